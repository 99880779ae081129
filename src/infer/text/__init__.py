"""Between characters and token ids: chat templates, stop strings, detokenization."""
