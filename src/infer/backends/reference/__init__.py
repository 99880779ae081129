"""Plain torch on any device: the oracle and the fallback."""
