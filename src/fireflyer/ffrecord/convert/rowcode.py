"""Rows in v1 files, whose samples are bytes alone.

A row is eight bytes, `C1 "FFROW1" 0A` (C1 begins no MessagePack value), and a MessagePack map in the order of
the columns: bytes as bin, str as str, numbers and arrays as [dtype, shape, little-endian bytes].
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from fireflyer.errors import Corrupted
from fireflyer.ffrecord.convert.source import Column, Row

MAGIC = b"\xc1FFROW1\n"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def encode(row: Row) -> bytes:
    return MAGIC + _encoder.encode({name: _packed(value) for name, value in row.items()})


def _packed(value: Any) -> Any:
    if isinstance(value, str | bytes | bytearray | memoryview):
        return value
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [array.dtype.name, array.shape, array.tobytes()]


def decode(sample: bytes, where: str) -> Row:
    """
    Raises:
        Corrupted: not a row.
    """
    try:
        if not sample.startswith(MAGIC):
            raise ValueError("it does not begin as a row")
        found = _decoder.decode(sample[len(MAGIC) :])
        return {name: _unpacked(value) for name, value in found.items()}
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise Corrupted(f"{where} is not a row: {error}") from error


def _unpacked(value: Any) -> Any:
    if isinstance(value, str | bytes):
        return value
    dtype_name, shape, data = value
    dtype = np.dtype(dtype_name)
    sizes = tuple(shape)
    if dtype.kind not in "biufc" or not isinstance(data, bytes):
        raise ValueError("an array without numbers")
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("an array without a shape")
    if prod(sizes) * dtype.itemsize != len(data):
        raise ValueError("an array of another size than its shape")
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(sizes)


def columns_of(row: Row) -> Sequence[Column]:
    """Columns that hold this row; the sizes of its arrays are free."""
    found = []
    for name, value in row.items():
        if isinstance(value, np.ndarray):
            found.append(Column(name, value.dtype.name, (None,) * value.ndim))
        else:
            found.append(Column(name, "str" if isinstance(value, str) else "bytes"))
    return found
