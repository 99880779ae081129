"""A record of what the scheduler was told and what it decided, and its replay without a model."""
