"""Built-in logits processors, one per file."""
