"""Deprecated path of `fireflyer.hfreduce.backend.planned_hierarchy`."""

from fireflyer import deprecated

deprecated.module(__name__, "fireflyer.hfreduce.backend.planned_hierarchy")
