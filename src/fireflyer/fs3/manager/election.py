"""Election of the primary manager by a lease in the metadata store: a state machine without I/O.

The store's clock is not used. A primary renews its row. If another process sees the row unchanged
for `dead_s` of its own clock, that process may take the row, with the next epoch. A primary that
could not renew for `lease_s` stops acting before any other process can take over.

If the store admits one process at a time, that process does not renew its row. It only reads the
row, so a full disk does not end its term.
"""

import msgspec

from fireflyer.fs3.manager.leases import Times


class Primary(msgspec.Struct, frozen=True, array_like=True):
    """Row of the primary.

    Attributes:
        epoch: fencing token against writes of older primaries; grows with each primary.
        holder: random number of the primary's process.
        address: address of the primary.
        beat: number of renewals.
    """

    epoch: int
    holder: int
    address: str
    beat: int


class Election:
    """State of one process in the election."""

    def __init__(self, holder: int, address: str, times: Times, *, alone: bool = False) -> None:
        """Makes the state of a process.

        Args:
            alone: True if the store admits one process at a time, so any other primary has ended.
        """
        self._holder, self._address, self._times = holder, address, times
        self._alone = alone
        self._seen: Primary | None = None
        self._since = 0.0
        self._ends = float("-inf")
        self.epoch = 0
        """Epoch of the current term, or of the last one."""

    def decide(self, now: float, row: Primary | None) -> Primary | None:
        """Returns the row that makes this process primary; None if it is not primary.

        The caller writes the returned row unless that equals `row`. A retried transaction may call
        this again. Take `now` after the read of `row`: the time for which a row is unchanged counts
        from `now`.
        """
        if row is None:
            return Primary(1, self._holder, self._address, 1)
        if row.holder == self._holder and row.epoch == self.epoch and self.holds(now):
            if self._alone:
                return row
            return msgspec.structs.replace(row, beat=row.beat + 1)
        if row != self._seen:
            self._seen, self._since = row, now
        waited = now - self._since >= self._times.dead_s
        if waited or self._alone or row.holder == self._holder:
            return Primary(row.epoch + 1, self._holder, self._address, 1)
        return None

    def written(self, row: Primary, begun: float) -> None:
        """Records that `row` is in the store; the lease counts from `begun`, the transaction's start."""
        self.epoch, self._seen = row.epoch, row
        self._ends = begun + self._times.lease_s

    def lost(self) -> None:
        """Ends the lease of this process immediately."""
        self._ends = float("-inf")

    def holds(self, now: float) -> bool:
        return now < self._ends

    @property
    def primary(self) -> str:
        """Address of the last known primary, or ""."""
        return self._seen.address if self._seen else ""
