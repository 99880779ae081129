"""Carries plans to the worker and results back."""
