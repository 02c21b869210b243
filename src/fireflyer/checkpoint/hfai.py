"""Deprecated path of `fireflyer.checkpoint.integrations.hfai`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.checkpoint.integrations.hfai")
