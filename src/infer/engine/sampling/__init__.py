"""From logits to sampled ids, one transform per file."""
