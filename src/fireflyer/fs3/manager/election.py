"""Election of the primary among the manager processes: a lease in the metadata store. Pure.

The store's clock is not used. A primary renews its row. A process that has seen the row unchanged
for a whole `dead_s` of its own clock may take it, with the next epoch. A primary that could not
renew for `lease_s` stops acting, before any other process can have taken over.

If the store admits one process at a time, that process keeps its row as it is. Finding the row is
enough, so a store without space does not end its term.
"""

import msgspec

from fireflyer.fs3.manager.leases import Times


class Primary(msgspec.Struct, frozen=True, array_like=True):
    """Row of the primary.

    Attributes:
        epoch: grows with each primary; fencing token against writes of older ones.
        holder: random number of the process.
        address: at which it answers.
        beat: grows with each renewal.
    """

    epoch: int
    holder: int
    address: str
    beat: int


class Election:
    """Part of one process in the election."""

    def __init__(self, holder: int, address: str, times: Times, *, alone: bool = False) -> None:
        """`alone`: the store admits one process at a time, so any other primary has ended."""
        self._holder, self._address, self._times = holder, address, times
        self._alone = alone
        self._seen: Primary | None = None
        self._since = 0.0
        self._ends = float("-inf")
        self.epoch = 0
        """Epoch of the term held or held last."""

    def decide(self, now: float, row: Primary | None) -> Primary | None:
        """Returns the row that makes this process primary; None: it is not primary.

        The caller writes the row unless it is `row`. A repeated transaction may call this again.

        `now` must be taken after `row` was read, because an unchanged row counts from when it was
        surely there.
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
        """Records that `row` is in the store; the lease counts from the transaction's begin."""
        self.epoch, self._seen = row.epoch, row
        self._ends = begun + self._times.lease_s

    def lost(self) -> None:
        """Ends the lease of this process at once."""
        self._ends = float("-inf")

    def holds(self, now: float) -> bool:
        return now < self._ends

    @property
    def primary(self) -> str:
        """Address of the primary seen last, or ""."""
        return self._seen.address if self._seen else ""
