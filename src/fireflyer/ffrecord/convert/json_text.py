"""JSON of values, with NaN and infinity written and read as Python does."""

import base64
import json
import math
from typing import Any

import msgspec
import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.source import Row, is_unicode

NAN_FORMS = ("NaN", "null")

_OBJECT = msgspec.json.Decoder(dict[str, Any])


class JsonEncoder:
    """Encoder of values: bytes become base64, arrays become lists. Not thread-safe.

    Args:
        nan: "NaN" writes NaN, Infinity and -Infinity, which Python and JavaScript's JSON5 read;
            "null" writes null for these values, as strict JSON needs.
    """

    def __init__(self, nan: str = "NaN") -> None:
        self._null = nan == "null"
        self._finite = True

    def row(self, row: Row) -> bytes:
        """Returns a row as an object.

        Raises:
            ConfigError: a value that JSON cannot express; the error names its column.
        """
        return self._encoded({name: self._plain(name, value) for name, value in row.items()})

    def value(self, name: str, value: Any) -> bytes:
        """Returns a value of column `name`; raises what `row` does."""
        return self._encoded(self._plain(name, value))

    def _encoded(self, plain: Any) -> bytes:
        finite, self._finite = self._finite, True
        if finite:
            return msgspec.json.encode(plain)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()

    def _plain(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._plain(name, item) for item in value]
        if isinstance(value, dict):
            return {key: self._plain(name, item) for key, item in value.items()}
        if isinstance(value, bytes | bytearray | memoryview):
            return base64.b64encode(value).decode()
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind in "biu" or (value.dtype.kind == "f" and np.isfinite(value).all()):
                return value.tolist()
            if value.dtype.kind == "f":
                return self._plain(name, value.tolist())
        elif isinstance(value, str):
            if is_unicode(value):
                return value
        elif not isinstance(value, float) or math.isfinite(value):
            return value
        else:
            self._finite = self._finite and self._null
            return None if self._null else value
        shown = value.ravel()[:3] if isinstance(value, np.ndarray) else repr(value)[:100]
        raise ConfigError(f"column {name!r}: JSON cannot represent {shown}")


def decoded_object(line: bytes) -> dict[str, Any]:
    """Returns the object in a line of JSON, which may hold NaN, Infinity and -Infinity.

    Raises:
        ValueError: the line is not such an object; the message says why.
    """
    try:
        return _OBJECT.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    try:
        found = json.loads(line.decode(), parse_float=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(reason)
    if (half := _surrogate(found)) is not None:
        raise ValueError(
            f"its text holds {half!r}, one half of a character: write the whole character"
        )
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _surrogate(value: Any) -> str | None:
    """Returns a lone surrogate in the texts of a decoded value; None if there is none."""
    if isinstance(value, str):
        return None if is_unicode(value) else next(c for c in value if "\ud800" <= c <= "\udfff")
    items = [*value, *value.values()] if isinstance(value, dict) else value
    halves = map(_surrogate, items) if isinstance(items, list) else ()
    return next((half for half in halves if half is not None), None)
