"""Auxiliary outputs, scheduler half: cursors, hashes and retention of captured rows. No payload but the delivered rows."""
