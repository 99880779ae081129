"""Built-in statistics loggers, one per file."""
