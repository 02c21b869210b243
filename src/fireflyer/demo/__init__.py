"""The demo: train a model, lose a worker, carry on."""
