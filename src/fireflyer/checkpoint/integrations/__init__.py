"""Callbacks for training libraries: Lightning, the Hugging Face Trainer, hfai."""
