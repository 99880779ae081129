"""OpenAI's routes: models, chat completions, completions."""
