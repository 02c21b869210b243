"""Report of the time and memory of training steps, with advice."""
