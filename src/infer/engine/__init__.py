"""Loop, scheduler, KV accounting, worker: requests in, tokens out."""
