"""What frames hold: errors keep their kind, and damaged frames are refused."""

import random
from typing import Any

import msgspec
import pytest
from tests import draws

from fireflyer.errors import (
    Corrupted,
    DeadlineExceeded,
    FireflyerError,
    NotPrimary,
    ProtocolMismatch,
    RankFailed,
    WireError,
)
from fireflyer.rpc.exchange import Exchange
from fireflyer.rpc.frames import FRAME_LIMIT, FrameBuffer, frame
from fireflyer.rpc.messages import (
    failure,
    framed,
    parse_body,
    parse_failure,
    parse_reply,
    parse_request,
)


def over_the_wire(error: FireflyerError) -> FireflyerError:
    return parse_failure(msgspec.Raw(msgspec.msgpack.encode(failure(error))))


def payload(message: object) -> bytes:
    (only,) = FrameBuffer().feed(bytes(framed(message)))
    return only


def test_the_layout_of_messages() -> None:
    assert payload((7, "stat", 1500, {"a": 1})) == msgspec.msgpack.encode(
        [7, "stat", 1500, {"a": 1}]
    )
    request = parse_request(payload((7, "stat", 1500, [1])))
    assert (request.id, request.method, request.deadline_ms) == (7, "stat", 1500)
    assert parse_body(request.body, list[int]) == [1]


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("late"),
        Corrupted("chunk 7 fails its checksum"),
        RankFailed("rank 3 died", 3),
        NotPrimary("ask the other", "10.0.0.1:99"),
        FireflyerError("something"),
    ],
)
def test_errors_keep_kind_message_and_attributes(error: FireflyerError) -> None:
    again = over_the_wire(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.fields() == error.fields()
    assert again.retryable == error.retryable


def test_attributes_that_cannot_cross_stay_behind() -> None:
    error = WireError("x")
    vars(error).update(good=1, bad=object(), _hidden=2)
    assert over_the_wire(error).fields() == {"good": 1}


def test_an_unknown_kind_is_a_wire_error() -> None:
    raw = msgspec.Raw(msgspec.msgpack.encode(["FileEaten", "by the dog", {}]))
    error = parse_failure(raw)
    assert type(error) is WireError
    assert str(error) == "FileEaten: by the dog"
    unreadable = parse_failure(msgspec.Raw(msgspec.msgpack.encode(3)))
    assert type(unreadable) is ProtocolMismatch


def test_a_message_over_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolMismatch, match="over the limit"):
        framed((1, True, bytes(FRAME_LIMIT)))


@pytest.mark.parametrize(
    "message",
    [
        3,
        [],
        [1, "m", 5],
        [0, "m", 5, None],
        [-1, "m", 5, None],
        [1, "m", -5, None],
        [1, "m", 1 << 60, None],
        [1, 2, 5, None],
        [1, "m", 5, None, None],
    ],
)
def test_what_is_no_request(message: Any) -> None:
    with pytest.raises(ProtocolMismatch):
        parse_request(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("message", [3, [1, True], [0, True, None], [1, "topic", None]])
def test_what_is_no_reply(message: Any) -> None:
    with pytest.raises(ProtocolMismatch):
        parse_reply(msgspec.msgpack.encode(message))


def test_an_answer_to_what_was_never_asked() -> None:
    with pytest.raises(ProtocolMismatch, match="unknown request"):
        Exchange({}).feed(frame(msgspec.msgpack.encode([1, True, None])))


def damaged(chance: random.Random, good: bytes) -> bytes:
    """Bytes turned, cut, added or made up."""
    way = chance.randrange(4)
    if way == 0:
        return chance.randbytes(chance.randrange(1, 60))
    if way == 1:
        return good[: chance.randrange(len(good))]
    data = bytearray(good)
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data) + (chance.randbytes(5) if way == 3 else b"")


def parse_whole(data: bytes) -> None:
    parse_body(parse_request(data).body, dict[str, list[float | None]])


@pytest.mark.parametrize("parse", [parse_request, parse_reply, parse_whole])
def test_damaged_frames(parse: Any) -> None:
    """Each is refused with the typed error, or is a message that a peer could have meant."""
    chance, frames = draws.drawn("messages"), draws.cases(100_000)
    samples = [
        (1, "stat", 1500, {"path": "/a", "n": [1, 2.5, None]}),
        (5, True, b"x" * 9),
        (0, "t", 1),
    ]
    goods = [msgspec.msgpack.encode(sample) for sample in samples]
    refused = 0
    for _ in range(frames):
        try:
            parse(damaged(chance, chance.choice(goods)))
        except ProtocolMismatch:
            refused += 1
    assert refused > frames // 2


def test_nesting_beyond_any_use_is_refused() -> None:
    with pytest.raises(ProtocolMismatch):
        parse_body(msgspec.Raw(b"\x91" * 100_000 + b"\x00"), list)
