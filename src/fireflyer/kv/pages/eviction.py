"""Choice of the segments and pages that leave a full cache. Pure.

The oldest segments leave. Of their pages the used ones are written again, into a new segment: those
with the most uses first, and of equal uses the heads of prefixes first, because a page is of use only
if all pages before it are there. A use of a page is a use of all pages before it, so of one prefix the
tail leaves before the head.
"""

from collections.abc import Sequence

import msgspec

SHARE = 0.5
"""Most bytes of a segment that are written again, so each eviction frees at least as many."""


class Resident(msgspec.Struct, frozen=True):
    """Page of a segment that may leave."""

    digest: bytes
    size: int
    offset: int
    crc: int
    hits: int
    position: int
    salt: bytes
    pinned: bool


def survivors(pages: Sequence[Resident], size: int) -> list[Resident] | None:
    """Returns the pages of a segment of `size` bytes that are written again.

    Pinned pages come first. None: they alone are more than `SHARE`, so the segment stays.
    """
    room = int(size * SHARE)
    kept = [page for page in pages if page.pinned]
    room -= sum(page.size for page in kept)
    if room < 0:
        return None
    used = [page for page in pages if page.hits and not page.pinned]
    for page in sorted(used, key=lambda page: (-page.hits, page.position)):
        if page.size <= room:
            room -= page.size
            kept.append(page)
    return kept
