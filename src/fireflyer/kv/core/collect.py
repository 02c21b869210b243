"""Garbage collection of objects. The collection writes no data, so it works on a full disk.

A manifest is live if it is pinned, or if its number is at least the `boundary` of the newest
manifest. The tables and log objects that a live manifest needs are live, too. A table that is no
longer in a live manifest never returns to one, so it can be deleted at any time.
"""

from collections.abc import Iterable

import msgspec

from fireflyer.kv.core.manifest import Manifest, current, decode, stale
from fireflyer.kv.core.operations import (
    LOG,
    MANIFESTS,
    TABLES,
    Delete,
    ListNames,
    Read,
    Steps,
    epoch_of,
    listed,
    log_name,
    manifest_name,
)
from fireflyer.kv.core.pins import PinWatch
from fireflyer.kv.core.writer import Writer


class Collected(msgspec.Struct):
    """Numbers of deleted objects."""

    manifests: int = 0
    log: int = 0
    tables: int = 0
    temporary: int = 0


def collect(
    writer: Writer, watch: PinWatch, now: float, local: Iterable[int] = ()
) -> Steps[Collected]:
    """Deletes objects to which no live manifest refers.

    Args:
        now: monotonic seconds.
        local: numbers of manifests that views of this process use.

    Raises:
        Stale: another writer took over, and collects instead.
    """
    # The tables are listed before `base` is read, so each listed table is garbage, in flight, or
    # named by `base` or an older manifest.
    in_flight = set(writer.in_flight)
    names: list[str] = yield ListNames(TABLES)
    in_flight |= writer.in_flight
    base = writer.manifest
    pins = yield from watch.living(now)
    kept = {pin.manifest for pin in pins.values()} | set(local)
    present = yield from listed(MANIFESTS)
    live: list[Manifest] = [base]
    tables = base.tables() | in_flight
    for number in present:
        if number == base.number or (number < base.boundary and number not in kept):
            continue
        data = yield Read(manifest_name(number))
        if data is None:
            continue
        found = decode(number, data)
        tables |= found.tables()
        if number >= base.boundary:
            live.append(found)
    newest = yield from current()
    if newest is None or newest.writer != writer.identity:
        raise stale(writer.epoch, newest.epoch if newest else 0)
    done = Collected()
    for name in names:
        epoch = epoch_of(name)
        if epoch is not None and epoch <= writer.epoch and name not in tables:
            yield Delete(f"{TABLES}/{name}")
            done.tables += 1
    feed = min(manifest.feed for manifest in live)
    for number in (yield from listed(LOG)):
        if number < feed:
            yield Delete(log_name(number))
            done.log += 1
    for number in present:
        if number < base.boundary and number not in kept:
            yield Delete(manifest_name(number))
            done.manifests += 1
    return done


def clean_temporary() -> Steps[int]:
    """Deletes files of killed writers; call it between the take-over and the first write."""
    count = 0
    for folder in (LOG, MANIFESTS, TABLES):
        for name in (yield ListNames(folder)):
            if name.endswith(".tmp"):
                yield Delete(f"{folder}/{name}")
                count += 1
    return count
