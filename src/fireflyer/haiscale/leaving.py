"""Whether to leave, agreed among the ranks by what ends each backward anyway.

Behind its own bytes the mask of a backward carries a *tail*, reduced with MAX as they are: one byte of
`Leaving`, then what `weighing.Weighing` has to say.
"""

from collections.abc import Callable
from typing import Protocol

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.refusals import given
from fireflyer.log import get_logger

_NO, _YES, _FAILED = range(3)
_log = get_logger("haiscale")


class Part(Protocol):
    """Of a tail."""

    @property
    def tail_bytes(self) -> int: ...

    def write(self) -> bytes:
        """This rank's; on all ranks in the same order of backwards."""

    def read(self, tail: bytes) -> None:
        """That of all ranks."""


class Tail:
    """What rides on a mask: these parts, one behind the other."""

    def __init__(self, *parts: Part | None) -> None:
        self._parts = [part for part in parts if part is not None]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.tail_bytes for part in self._parts)

    def write(self) -> bytes:
        return b"".join(part.write() for part in self._parts)

    def read(self, tail: bytes) -> None:
        for part in self._parts:
            size = part.tail_bytes
            part.read(tail[:size])
            tail = tail[size:]


class Leaving:
    """Asks this rank with each synchronised backward, until one says yes, and tells what all have said.

    Tails are read when somebody waits for gradients, which may be sooner on one rank than on another. So what
    they say counts from `learn`, at places where all ranks have read the same ones.

    Args:
        should_suspend: whether this rank was asked to leave; None: nobody is asked, nothing is sent.

    Attributes:
        suspending: a rank was asked to leave; alike on all.

    Raises:
        ConfigError: it is no function.
    """

    def __init__(self, should_suspend: Callable[[], bool] | None) -> None:
        if should_suspend is not None and not callable(should_suspend):
            raise ConfigError(f"should_suspend={given(should_suspend)}: give a function, or None")
        self._should_suspend = should_suspend
        self.forget()

    def forget(self) -> None:
        """The ranks are others: all are asked anew."""
        self.suspending = False
        self._heard = _NO
        self._failure: BaseException | None = None

    @property
    def tail_bytes(self) -> int:
        return 0 if self._should_suspend is None else 1

    def write(self) -> bytes:
        if self._should_suspend is None:
            return b""
        answer = self._heard
        try:
            if answer == _NO and self._should_suspend():
                answer = _YES
        except BaseException as error:  # noqa: BLE001 - raised by `learn`, once the others know
            answer, self._failure = _FAILED, error
        return bytes([answer])

    def read(self, tail: bytes) -> None:
        self._heard = tail[0] if tail else _NO

    def learn(self) -> None:
        """All tails that were written have been read on this rank, and those of the same backwards on the
        others when they come here.

        Raises:
            CollectiveError: another rank could not tell; there it is that rank's own error.
        """
        if self._heard == _FAILED:
            failure = self._failure
            self.forget()
            if failure is not None:
                raise failure
            raise CollectiveError(
                "another rank could not tell whether to leave; its own error says why"
            )
        if self._heard == _YES and not self.suspending:
            self.suspending = True
            _log.info("a rank was asked to leave")
