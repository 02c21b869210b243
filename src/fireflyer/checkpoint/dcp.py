"""Deprecated path of `fireflyer.checkpoint.formats.dcp`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.checkpoint.formats.dcp")
