"""Statistics and verification of a store, without a writer."""

from typing import Any

from fireflyer._native.kv import BlockCache
from fireflyer.errors import Corrupted, KvError
from fireflyer.kv.core import frames, tables
from fireflyer.kv.core.manifest import Manifest, TableRef, current
from fireflyer.kv.core.operations import LOG, PINS, ListNames, Read, Steps, listed, log_name
from fireflyer.kv.core.reader import no_store
from fireflyer.kv.shell import run
from fireflyer.storage import Storage


def _current(storage: Storage) -> Manifest:
    manifest = run(storage, current())
    if manifest is None:
        raise no_store(storage)
    return manifest


def require_store(storage: Storage) -> None:
    """Reads the current manifest. Raises KvError if there is no store, and creates none."""
    _current(storage)


def stat(storage: Storage) -> dict[str, Any]:
    """Returns statistics of a store by name. Raises KvError if there is no store."""
    manifest = _current(storage)
    log: list[int] = run(storage, listed(LOG))
    refs = [ref for run_ in manifest.runs for ref in run_]
    return {
        "epoch": manifest.epoch,
        "manifest": manifest.number,
        "sequence_in_tables": manifest.sequence,
        "runs": len(manifest.runs),
        "tables": len(refs),
        "table_bytes": sum(ref.bytes for ref in refs),
        "records": sum(ref.records for ref in refs),
        "log_objects_to_replay": sum(number > manifest.flushed for number in log),
        "pins": len(run(storage, _names(PINS))),
    }


def _names(folder: str) -> Steps[list[str]]:
    names: list[str] = yield ListNames(folder)
    return names


def check(storage: Storage) -> dict[str, Any]:
    """Verifies every object that the newest state needs.

    Returns:
        Numbers of verified objects, and a list "damaged" of objects with reasons.

    Raises:
        KvError: there is no store.
        Corrupted: the newest manifest is damaged.
    """
    manifest = _current(storage)
    damaged: list[dict[str, str]] = []
    count = 0
    for refs in manifest.runs:
        for ref in refs:
            count += 1
            try:
                run(storage, _verified_table(ref))
            except (Corrupted, KvError, tables.Gone) as error:
                damaged.append({"object": f"table/{ref.name}", "reason": str(error)})
    log = [number for number in run(storage, listed(LOG)) if number > manifest.flushed]
    for number in range(manifest.flushed + 1, max(log, default=manifest.flushed) + 1):
        try:
            run(storage, _verified_log(number))
        except Corrupted as error:
            damaged.append({"object": log_name(number), "reason": str(error)})
    return {
        "manifest": manifest.number,
        "tables": count,
        "log_objects": len(log),
        "damaged": damaged,
    }


def _verified_table(ref: TableRef) -> Steps[None]:
    table = tables.handle(ref, BlockCache(tables.READ_AHEAD))
    yield from tables.supply(table, -1)
    at = 0
    while at < table.blocks:
        offset, size = table.range(at, tables.READ_AHEAD)
        yield from tables.supply(table, at, tables.READ_AHEAD)
        begin = offset
        while at < table.blocks and table.range(at)[0] < begin + size:
            at += 1


def _verified_log(number: int) -> Steps[None]:
    data = yield Read(log_name(number))
    if data is None:
        raise Corrupted(f"log object {number} is missing: restore it from a replica")
    frames.decode(number, data)
