"""Formats of other libraries: safetensors and torch.distributed.checkpoint."""
