"""Deprecated path of `fireflyer.checkpoint.integrations.lightning`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.checkpoint.integrations.lightning")
