"""One weight format per file."""
