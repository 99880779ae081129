"""From logits to token ids: one transform per file, the order written once in `sampler`."""
