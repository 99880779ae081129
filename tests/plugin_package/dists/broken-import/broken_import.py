"""Raises while it is imported."""

raise RuntimeError("this build lacks its license file")
