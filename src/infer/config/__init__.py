"""Settings asked for, facts read, decisions made. No tensors."""
