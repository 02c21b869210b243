"""Sizes as people write them: "64K", "16M", "1GiB"."""

import re

_SIZE = re.compile(r"(\d{1,18})\s*(?:([KMGT])(?:iB)?|B)?", re.IGNORECASE | re.ASCII)
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Returns the bytes of "64K", "16M", "1GiB" or "1000"; units are powers of 1024.

    Raises:
        ValueError: the text is no size above zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _BYTES[(match[2] or "").upper()] if match else 0
    if not size:
        raise ValueError(
            f"invalid size {text[:40]!r}: expected e.g. 64K, 256M, 1G or a number of bytes"
        )
    return size
