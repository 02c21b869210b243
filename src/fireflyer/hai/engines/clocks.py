"""Translates times of another machine to this machine's monotonic clock. Pure.

CLOCK_MONOTONIC counts from each machine's own boot, so only wall clocks of two machines can be
compared. The wall clocks are assumed to be in sync.
"""

from msgspec.structs import replace

from fireflyer.hai.engines.gang import Now
from fireflyer.hai.supervisor.messages import PartEnded, Record

SAME_NS = 100_000_000
"""Maximum difference in nanoseconds of clocks that count as equal; wall clocks are not more
accurate."""


def translated(record: Record, now: Now) -> Record:
    """Returns the record with its times converted to this machine's clock, whose time is `now`."""
    event = record.event
    ours = now.monotonic_ns - round((now.wall - event.wall) * 1e9)
    shift = ours - event.monotonic_ns
    if abs(shift) < SAME_NS:
        return record
    if isinstance(event, PartEnded):
        failed = event.failed_ns + shift if event.failed_ns else 0
        changed = replace(event, monotonic_ns=ours, failed_ns=failed)
        return replace(record, event=changed)
    return replace(record, event=replace(event, monotonic_ns=ours))
