"""Experts served from tiers: `Store` moves models between a folder, host memory and a device."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fireflyer.experts.parts import Stats
    from fireflyer.experts.store import Store
    from fireflyer.experts.tensors import Expert

__all__ = ["Expert", "Stats", "Store"]


def __getattr__(name: str) -> object:
    """Imports names that need torch on their first use, because the simulation needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module("fireflyer.experts.store"), name)
    return found
