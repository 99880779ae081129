"""What only a GPU can show: checks, kernel and engine figures, one JSON. Started by run.sh; see docs/gpu.md."""
