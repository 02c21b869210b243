"""Requests in flight on one connection. Not thread-safe: the caller must hold a lock."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fireflyer.errors import FireflyerError, ProtocolMismatch
from fireflyer.rpc.frames import FrameBuffer
from fireflyer.rpc.messages import framed, parse_failure, parse_reply

Sink = Callable[[msgspec.Raw | FireflyerError], None]
"""Callback that takes the body of an answer, or an error; called once."""
Push = Callable[[msgspec.Raw], None]


class Exchange:
    """State of one connection: requests that it sent, answers and pushes that it received.

    Attributes:
        received: number of received frames; distinguishes a silent connection from a slow answer.
    """

    def __init__(self, pushes: Mapping[str, Push]) -> None:
        self._pushes = pushes
        self._sinks: dict[int, Sink] = {}
        self._last = 0
        self._frames = FrameBuffer()
        self.received = 0

    def request(self, method: str, body: Any, left_s: float, sink: Sink) -> tuple[int, bytearray]:
        """Returns the number of a new request and its frame; `sink` gets its answer."""
        number = self._last + 1
        out = framed((number, method, max(1, int(left_s * 1000)), body))
        self._last = number
        self._sinks[number] = sink
        return number, out

    def forget(self, number: int) -> None:
        """Drops the callback of a request; its answer may still come."""
        self._sinks.pop(number, None)

    def feed(self, data: bytes) -> list[Callable[[], None]]:
        """Returns the callbacks for the received bytes, in order.

        Raises:
            ProtocolMismatch: a frame is neither an answer to a known request nor a push.
        """
        calls: list[Callable[[], None]] = []
        for payload in self._frames.feed(data):
            self.received += 1
            reply = parse_reply(payload)
            if isinstance(reply.what, str):
                push = self._pushes.get(reply.what)
                if push:
                    calls.append(_bound(push, reply.body))
                continue
            if reply.id > self._last:
                raise ProtocolMismatch("received an answer to an unknown request")
            sink = self._sinks.pop(reply.id, None)
            if sink:
                outcome = reply.body if reply.what else parse_failure(reply.body)
                calls.append(_bound(sink, outcome))
        return calls

    def lost(self, error: FireflyerError) -> list[Callable[[], None]]:
        """Returns the callbacks for a lost connection: every sink gets a separate error."""
        sinks, self._sinks = list(self._sinks.values()), {}
        return [_bound(sink, type(error)(str(error))) for sink in sinks]


def _bound(take: Callable[[Any], None], value: Any) -> Callable[[], None]:
    return lambda: take(value)
