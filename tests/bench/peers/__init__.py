"""Drivers of infer and of other engines for `compare_peers.py`: one process each, the same work, one JSON object out.

The drivers run in the interpreter of the engine they drive, so what they share (`timing`) is standard library alone.
"""
