"""Frames survive any cut of the stream; what is no frame is refused before memory is spent on it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.errors import PeerLost, ProtocolMismatch
from fireflyer.rpc import FRAME_LIMIT, FrameBuffer, frame, read_frame


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 20), min_size=1))
def test_any_cut_of_the_stream_gives_the_same_frames(
    payloads: list[bytes], sizes: list[int]
) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    buffer, received, at, turn = FrameBuffer(), list[bytes](), 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        received += buffer.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert received == payloads
    assert not buffer.partial


def test_layout() -> None:
    assert frame(b"abc") == b"\x03\0\0\0abc"
    assert frame(b"") == b"\0\0\0\0"


def test_a_length_over_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        frame(bytes(FRAME_LIMIT + 1))
    with pytest.raises(ProtocolMismatch, match="does not speak"):
        list(FrameBuffer().feed(b"GET / HTTP/1.1"))


def read(data: bytes) -> list[bytes | None]:
    """All frames of a stream that ends after `data`, up to the None of its end."""

    async def scenario() -> list[bytes | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        frames: list[bytes | None] = []
        while not frames or frames[-1] is not None:
            frames.append(await read_frame(reader))
        return frames

    return asyncio.run(scenario())


def test_reading_a_stream() -> None:
    assert read(frame(b"one") + frame(b"")) == [b"one", b"", None]


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_an_end_inside_a_frame_is_a_lost_peer(cut: int) -> None:
    with pytest.raises(PeerLost, match="inside a frame"):
        read(frame(b"abc")[:cut])


def test_reading_refuses_a_length_over_the_limit() -> None:
    with pytest.raises(ProtocolMismatch):
        read(b"\xff\xff\xff\xff")
