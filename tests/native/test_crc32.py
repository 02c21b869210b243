"""CRC32 is zlib's, at every length and alignment."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer._native import crc32


@given(st.binary(max_size=1200), st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_equals_zlib_at_any_length_and_alignment(data: bytes, offset: int, value: int) -> None:
    view = memoryview(bytes(offset) + data)[offset:]
    assert crc32(view, value) == zlib.crc32(data, value)


def test_equals_zlib_over_many_megabytes() -> None:
    data = np.random.default_rng(0).bytes(5_000_003)
    assert crc32(data) == zlib.crc32(data)


def test_refuses_a_strided_buffer() -> None:
    with pytest.raises(BufferError):
        crc32(memoryview(bytes(10))[::2])
