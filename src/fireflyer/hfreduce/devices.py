"""Deprecated path of `fireflyer.hfreduce.backend.devices`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.hfreduce.backend.devices")
