"""Contents of control frames: msgpack arrays, and errors that keep their class.

request  [id, method, deadline in ms, body]      id from 1, unique among requests in flight
answer   [id, true, body]
error    [id, false, [kind, message, fields]]
push     [0, topic, body]
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from fireflyer.errors import FireflyerError, ProtocolMismatch, WireError
from fireflyer.rpc.frames import FRAME_LIMIT, PREFIX

T = TypeVar("T")
UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""Errors of decoding: a wrong structure, invalid UTF-8, or too large a number or depth."""
LONGEST_DEADLINE_MS = 24 * 3600 * 1000


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    id: int
    method: str
    deadline_ms: int
    body: msgspec.Raw


class Reply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Answer (`what` is True), error (False) or push (its topic)."""

    id: int
    what: bool | str
    body: msgspec.Raw


class Failure(msgspec.Struct, array_like=True):
    """Error on the wire: the name of its class, its message, its attributes."""

    kind: str
    message: str
    fields: dict[str, Any] = {}


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_failures = msgspec.msgpack.Decoder(Failure)


def framed(message: object) -> bytearray:
    """Encodes a message as one frame.

    Raises:
        ProtocolMismatch: the message is larger than a frame may be.
        TypeError: a part of the message cannot be encoded.
    """
    out = bytearray(PREFIX)
    _encoder.encode_into(message, out, PREFIX)
    size = len(out) - PREFIX
    if size > FRAME_LIMIT:
        raise ProtocolMismatch(
            f"a message of {size} bytes is over the limit of {FRAME_LIMIT}: send it in parts"
        )
    out[:PREFIX] = size.to_bytes(PREFIX, "little")
    return out


def parse_request(payload: bytes) -> Request:
    """Decodes a request; raises ProtocolMismatch for anything else."""
    try:
        request = _requests.decode(payload)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"received an invalid request: {type(error).__name__}") from None
    if request.id < 1 or not 0 <= request.deadline_ms <= LONGEST_DEADLINE_MS:
        raise ProtocolMismatch("received a request with an invalid number or deadline")
    return request


def parse_reply(payload: bytes) -> Reply:
    """Decodes a reply; raises ProtocolMismatch for anything else."""
    try:
        reply = _replies.decode(payload)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"received an invalid answer: {type(error).__name__}") from None
    if (reply.id == 0) != isinstance(reply.what, str):
        raise ProtocolMismatch("received a message that is neither an answer nor a push")
    return reply


def parse_body(body: msgspec.Raw, kind: type[T]) -> T:
    """Decodes a body; raises ProtocolMismatch if it is not of type `kind`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"received an invalid body: {error}") from None


def failure(error: FireflyerError) -> Failure:
    """Encodes an error for the wire; drops attributes that cannot be encoded."""
    fields = {}
    for name, value in error.fields().items():
        if name.startswith("_"):
            continue
        try:
            _encoder.encode(value)
        except (TypeError, ValueError, OverflowError):
            continue
        fields[name] = value
    return Failure(type(error).__name__, str(error), fields)


def parse_failure(body: msgspec.Raw) -> FireflyerError:
    """Decodes the peer's error to an error of the class that it names; to a WireError if this
    process has no such class."""
    try:
        decoded = _failures.decode(body)
    except UNREADABLE:
        return ProtocolMismatch("received an invalid error")
    kind = _kinds().get(decoded.kind)
    if kind is None:
        return WireError(f"{decoded.kind}: {decoded.message}")
    fields = {name: value for name, value in decoded.fields.items() if not name.startswith("_")}
    try:
        return kind.rebuild(decoded.message, fields)
    except (TypeError, ValueError, KeyError, AttributeError):
        return WireError(f"{decoded.kind}: {decoded.message}")


def _kinds() -> Mapping[str, type[FireflyerError]]:
    def below(kind: type[FireflyerError]) -> Iterator[type[FireflyerError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return {kind.__name__: kind for kind in below(FireflyerError)}
