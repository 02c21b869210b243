"""Selection of the pages that survive the eviction of a segment.

The oldest segments are evicted. Their used pages are rewritten into a new segment: pages with the
most uses first, and for equal uses the heads of prefixes first, because a page is useful only with
all pages before it. A use of a page also counts for all pages before it, so the tail of a prefix is
evicted before the head.
"""

from collections.abc import Sequence

import msgspec

SHARE = 0.5
"""Maximum share of a segment that is rewritten, so each eviction frees at least the rest."""


class Resident(msgspec.Struct, frozen=True):
    """Page of a segment that may be evicted."""

    digest: bytes
    size: int
    offset: int
    crc: int
    hits: int
    position: int
    salt: bytes
    pinned: bool


def survivors(pages: Sequence[Resident], size: int) -> list[Resident] | None:
    """Selects the pages of a segment of `size` bytes that are rewritten.

    Pinned pages come first. Returns None if the pinned pages exceed `SHARE`; in that case the
    segment must stay.
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
