"""Agreement of the ranks on leaving, carried by the reduction that ends each backward.

The mask of a backward marks the parameters that the backward reached. After its own bytes, the mask
carries a *tail*: one byte of `SuspendVote`, then the bytes of `sample_weights.SampleWeights`. The
tail is reduced with MAX, like the mask.
"""

from collections.abc import Callable
from typing import Protocol

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.validation import given
from fireflyer.log import get_logger

_NO, _YES, _FAILED = range(3)
_log = get_logger("haiscale")


class TailPart(Protocol):
    """Part of a tail."""

    @property
    def tail_bytes(self) -> int: ...

    def write(self) -> bytes:
        """Returns this rank's bytes; all ranks call this method in the same order of backwards."""

    def read(self, tail: bytes) -> None:
        """Reads the reduced bytes of all ranks."""


class MaskTail:
    """Tail of a mask: its parts, one after the other."""

    def __init__(self, *parts: TailPart | None) -> None:
        self._parts = [part for part in parts if part is not None]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(part.tail_bytes for part in self._parts)

    def write(self) -> bytes:
        return b"".join(part.write() for part in self._parts)

    def read(self, tail: bytes) -> None:
        for part in self._parts:
            size = part.tail_bytes
            part.read(tail[:size])
            tail = tail[size:]


class SuspendVote:
    """Polls this rank with each synchronised backward, until a rank's answer is yes.

    A wait for gradients reads a tail, possibly sooner on one rank than on another. So answers count
    only from the next `learn` on, at points where all ranks have read the same tails.

    Args:
        should_suspend: returns True if this rank was asked to leave; None: no rank is polled and
            nothing is sent.

    Attributes:
        suspending: True if a rank was asked to leave; equal on all ranks.

    Raises:
        ConfigError: `should_suspend` is neither a function nor None.
    """

    def __init__(self, should_suspend: Callable[[], bool] | None) -> None:
        if should_suspend is not None and not callable(should_suspend):
            raise ConfigError(
                f"invalid should_suspend {given(should_suspend)}: expected a function or None"
            )
        self.should_suspend = should_suspend
        self.forget()

    def forget(self) -> None:
        """Starts over with changed members: all ranks are polled anew."""
        self.suspending = False
        self._heard = _NO
        self._failure: BaseException | None = None

    @property
    def tail_bytes(self) -> int:
        return 0 if self.should_suspend is None else 1

    def write(self) -> bytes:
        if self.should_suspend is None:
            return b""
        answer = self._heard
        try:
            if answer == _NO and self.should_suspend():
                answer = _YES
        except BaseException as error:  # noqa: BLE001 - `learn` raises it once all ranks know
            answer, self._failure = _FAILED, error
        return bytes([answer])

    def read(self, tail: bytes) -> None:
        self._heard = tail[0] if tail else _NO

    def learn(self) -> None:
        """Makes the answers count.

        Every rank must call this method after the same backward, once the rank has read all tails
        that it wrote.

        Raises:
            CollectiveError: another rank's `should_suspend` failed; that rank gets its own error.
        """
        if self._heard == _FAILED:
            failure = self._failure
            self.forget()
            if failure is not None:
                raise failure
            raise CollectiveError("should_suspend failed on another rank; see that rank's error")
        if self._heard == _YES and not self.suspending:
            self.suspending = True
            _log.info("a rank was asked to leave")
