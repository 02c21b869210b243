"""Demo: trains a model, loses a worker and continues."""
