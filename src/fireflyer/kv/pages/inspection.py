"""Statistics and verification of a page cache, without opening it."""

from typing import Any

from fireflyer._native import crc32c
from fireflyer.errors import Corrupted, StorageError
from fireflyer.kv.pages import layout
from fireflyer.kv.pages.catalog import Catalog, read_heads
from fireflyer.kv.pages.layout import SEGMENTS, Head
from fireflyer.kv.pages.pins import PINS
from fireflyer.storage import Storage


def stat(storage: Storage) -> dict[str, Any]:
    """Returns statistics of a cache by name; "usage" has the bytes by salt (in hexadecimal)."""
    catalog = Catalog(storage)
    catalog.refresh()
    damaged = sum(segment.number is None for segment in catalog.segments.values())
    return {
        "segments": len(catalog.segments),
        "damaged_segments": damaged,
        "bytes": catalog.total(),
        "pages": len(catalog.index),
        "index_bytes": catalog.index.memory,
        "pins": len([name for name in storage.list(PINS) if not name.endswith(".tmp")]),
        "usage": {salt.hex(): size for salt, size in catalog.usage().items()},
    }


def check(storage: Storage) -> dict[str, Any]:
    """Verifies every byte of every segment.

    Returns:
        Numbers of segments and pages, and a list "damaged" of objects with reasons. The cache
        treats a damaged page as a miss, so no repair is needed.
    """
    names = [name for name in storage.list(SEGMENTS) if layout.sequence_of(name)]
    damaged: list[dict[str, str]] = []
    pages = 0
    for name in names:
        found = read_heads(storage, [name])[0]
        if isinstance(found, Head):
            pages += len(found.pages())
            reasons = _wrong(storage, name, found)
        else:
            reasons = [str(found)] if isinstance(found, Corrupted) else []
        damaged += [{"object": f"{SEGMENTS}/{name}", "reason": reason} for reason in reasons]
    return {"segments": len(names), "pages": pages, "damaged": damaged}


def _wrong(storage: Storage, name: str, head: Head) -> list[str]:
    """Returns the faults of a segment's pages."""
    reasons: list[str] = []
    for page in head.pages():
        size = layout.padded(page.size)
        try:
            data = storage.read(f"{SEGMENTS}/{name}", page.offset, size)
        except StorageError as error:
            return [*reasons, str(error)]
        whole, zeros = memoryview(data)[: page.size], data[page.size :]
        good = len(data) == size and crc32c(whole, crc32c(page.digest)) == page.crc
        if not good or any(zeros):
            reasons.append(f"the page at byte {page.offset} is damaged")
    size_now = storage.size(f"{SEGMENTS}/{name}")
    if size_now is not None and size_now != head.size:
        reasons.append(f"it has {size_now} bytes instead of {head.size}")
    return reasons
