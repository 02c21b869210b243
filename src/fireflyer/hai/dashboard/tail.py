"""The end of a rank's log, which a page shows before the log is streamed."""

import os

import msgspec

from fireflyer.hai.controller.logs import LogFile
from fireflyer.hai.dashboard.text_filters import log_text

BYTES = 32_768


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The last lines of a log."""

    rank: int
    attempt: int
    text: str
    next: int
    """Byte offset after the text."""
    size: int
    cut: bool
    """True if the log has bytes before the text."""


def read(file: LogFile, rank: int) -> Tail:
    """Returns the last BYTES bytes of a log (all bytes of a shorter log), without incomplete
    characters. The text begins at the start of a line if a line starts in these bytes."""
    data, size = b"", 0
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    else:
        try:
            size = os.fstat(descriptor).st_size
            data = os.pread(descriptor, BYTES, max(0, size - BYTES))
        finally:
            os.close(descriptor)
    begin = max(0, size - BYTES)
    end = begin + len(data)
    if begin:
        line = data.find(b"\n")
        data = data[line + 1 :] if line >= 0 else data.lstrip(_INSIDE)
    whole = _whole(data)
    return Tail(
        rank=rank, attempt=file.attempt, text=log_text(whole.decode("utf-8", "replace")),
        next=end - (len(data) - len(whole)), size=size, cut=begin > 0,
    )  # fmt: skip


_INSIDE = bytes(range(0x80, 0xC0))
"""UTF-8 continuation bytes."""


def _whole(data: bytes) -> bytes:
    """Returns the data without an incomplete character at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
        if byte < 0x80:
            break
    return data
