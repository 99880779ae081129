"""KV connectors: where KV blocks are kept outside the engine."""
