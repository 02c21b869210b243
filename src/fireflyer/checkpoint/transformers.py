"""Deprecated path of `fireflyer.checkpoint.integrations.transformers`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.checkpoint.integrations.transformers")
