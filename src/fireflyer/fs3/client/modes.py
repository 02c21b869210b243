"""Modes of `Client.open`, and the text layer over a file."""

import io
from typing import Literal

from fireflyer.fs3.client.file import File

TextMode = Literal[
    "r", "r+", "w", "w+", "a", "a+", "x", "x+", "rt", "r+t", "rt+", "wt", "w+t", "wt+",
    "at", "a+t", "at+", "xt", "x+t", "xt+",
]  # fmt: skip
BinaryMode = Literal["rb", "r+b", "rb+", "wb", "w+b", "wb+", "ab", "a+b", "ab+", "xb", "x+b", "xb+"]

_PLAIN = {"r", "r+", "w", "w+", "a", "a+", "x", "x+"}
BUFFER_BYTES = 1 << 20
"""Size of the buffer between text and file; small requests would be expensive."""


def parse(mode: str) -> tuple[str, bool]:
    """Returns the mode without "b" and "t", and whether it is for text, as for Python's `open`.

    Raises:
        TypeError, ValueError: the mode is invalid.
    """
    if not isinstance(mode, str):
        raise TypeError(f"open() argument 'mode' must be str, not {type(mode).__name__}")
    kinds = [letter for letter in mode if letter in "bt"]
    plain = mode.replace("b", "").replace("t", "")
    if plain not in _PLAIN or len(kinds) > 1:
        raise ValueError(
            f"invalid mode {mode!r}: expected one of {sorted(_PLAIN)}, with 'b' for bytes"
        )
    return plain, kinds != ["b"]


def as_text(
    file: File, mode: str, encoding: str | None, errors: str | None, newline: str | None
) -> io.TextIOWrapper:
    """Wraps a file in a text layer that owns the file. An error closes the file.

    Raises:
        LookupError: unknown encoding.
        ValueError: invalid newline.
    """
    buffered: io.BufferedReader | io.BufferedWriter | io.BufferedRandom
    if file.readable() and file.writable():
        buffered = io.BufferedRandom(file, BUFFER_BYTES)
    elif file.writable():
        buffered = io.BufferedWriter(file, BUFFER_BYTES)
    else:
        buffered = io.BufferedReader(file, BUFFER_BYTES)
    try:
        text = io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)
    except BaseException:
        buffered.close()
        raise
    text.mode = mode  # type: ignore[misc]  # as Python's own open does
    return text
