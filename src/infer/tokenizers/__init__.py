"""One tokenizer format per file."""
