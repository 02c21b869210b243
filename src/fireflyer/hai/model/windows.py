"""Maintenance windows and reservations of nodes."""

import msgspec

LEAD_S = 600.0
"""Seconds before the begin of a window. In this time, no job of unknown length starts on the
window's nodes."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are out of use for maintenance, or reserved for a user or group, from `begin` to
    `end`."""

    id: str
    nodes: frozenset[str]
    begin: float
    end: float
    reason: str = ""
    user: str = ""
    group: str = ""
    """User and group that may use the nodes during the window; both empty: no job may."""

    def admits(self, user: str, group: str) -> bool:
        """Returns whether the window is a reservation for this user or group."""
        if not self.user and not self.group:
            return False
        return self.user in ("", user) and self.group in ("", group)

    def closes(self, estimate_s: float | None) -> float:
        """Returns the time from which a job of this length may not start on the nodes, because the
        job would not end before the window begins. `estimate_s` None: the length is not known."""
        return self.begin - (LEAD_S if estimate_s is None else estimate_s)
