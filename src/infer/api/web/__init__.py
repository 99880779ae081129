"""The chat page at `/`: one static file, no build step, nothing fetched from elsewhere."""
