"""Checkpoint formats and the way from their tensors to parameters."""
