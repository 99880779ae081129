"""Grammar backends, one per file."""
