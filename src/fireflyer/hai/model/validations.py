"""Entries about validations of nodes, as the journal stores them and the API sends them."""

from typing import Literal

import msgspec

Trigger = Literal["requested", "return", "fault", "weekly"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one figure: a value that a validation measures, for example a bandwidth."""

    name: str
    status: Literal["passed", "failed", "not run"]
    value: float | None = None
    unit: str = ""
    reason: str = ""
    better: Literal["more", "less"] = "more"


class Suspected(msgspec.Struct, frozen=True, kw_only=True, tag="suspected"):
    """A fault that the rules blame on a node."""

    node: str
    wall: float
    kind: str
    """Kind of the observation."""
    check: str = ""
    """Name of the figure, if the validator observed it."""
    drained: bool = False


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """Begin of a validation."""

    node: str
    wall: float
    task: str
    trigger: Trigger


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """End of a validation."""

    node: str
    wall: float
    task: str
    trigger: Trigger
    findings: tuple[Finding, ...] = ()
    """Results; empty: the validation gave no result, and `error` says why."""
    error: str = ""

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.status == "failed")


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag="returned"):
    """Return of a drained node to service."""

    node: str
    wall: float


Entry = Suspected | Started | Ended | Returned


class NodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of one node's journal, oldest first."""

    entries: tuple[Entry, ...]
