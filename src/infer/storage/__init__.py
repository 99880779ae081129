"""Storage targets: where artifacts are delivered, one target per file. Each is a plugin; nobody imports it by name."""
