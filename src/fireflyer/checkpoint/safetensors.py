"""Deprecated path of `fireflyer.checkpoint.formats.safetensors`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.checkpoint.formats.safetensors")
