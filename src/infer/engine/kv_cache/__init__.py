"""Block accounting: which block belongs to whom, and which can be reused. No payload."""
