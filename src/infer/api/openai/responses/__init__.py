"""`/v1/responses`: OpenAI's Responses API over the same plans, parsers and sampling as chat."""
