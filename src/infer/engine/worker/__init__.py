"""The data plane: builds batches, runs the model, samples."""
