"""Module of `dump`, as in the original."""

from fireflyer.ffrecord.writer import dump

__all__ = ["dump"]
