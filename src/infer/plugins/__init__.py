"""Contracts of everything that varies, the hooks that declare them, and the registry that finds them."""
