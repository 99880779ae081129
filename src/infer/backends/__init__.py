"""Platforms, one package each."""
