"""Anthropic's routes: messages, token counts."""
