"""Artifact fields that come with infer; each module is a plugin."""
