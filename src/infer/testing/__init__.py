"""Public test kits, strategies and fakes. Never imported at run time."""
