"""Modules that each forked rank would import for its first optimizer."""

import torch._dynamo  # noqa: F401
