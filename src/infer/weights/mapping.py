"""From checkpoint tensors to parameters."""
