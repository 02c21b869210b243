"""The original's module for `dump`."""

from fireflyer.ffrecord.writer import dump

__all__ = ["dump"]
