"""Worker processes that execute commands as lines of JSON, and worker processes that time work."""

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fireflyer.errors import DeadlineExceeded, PeerLost

ANSWER_S = 1800.0


class TimedProcess:
    """Worker process that answers each line with the seconds that its work took; a context manager.

    Args:
        does: description of the process's work, for error messages.
    """

    def __init__(
        self, does: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        self._does = does
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def seconds(self, line: str) -> float:
        """Sends the line and returns the answer.

        Raises:
            PeerLost: the process ended.
        """
        pipe, out = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert out is not None
        try:
            pipe.write(f"{line}\n")
            pipe.flush()
        except BrokenPipeError:
            raise PeerLost(f"the process that {self._does} ended") from None
        answer = out.readline()
        if not answer:
            raise PeerLost(f"the process that {self._does} ended with {self._process.wait()}")
        return float(answer)


class CommandProcess:
    """Worker process, from the constructor to `close`.

    Attributes:
        name: name of the process in error messages.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def ask(self, command: dict[str, Any], seconds: float = ANSWER_S) -> dict[str, Any]:
        """Sends one command and returns its answer.

        Raises:
            PeerLost: the process ended, or the command failed; the message quotes the process's
                error.
            DeadlineExceeded: there was no answer in time.
        """
        self.send(command)
        return self.receive(command, seconds)

    def send(self, command: dict[str, Any]) -> None:
        """Sends a command; `receive` must follow. Raises PeerLost if the process has ended."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise PeerLost(f"peer {self.name} ended") from None

    def receive(self, command: dict[str, Any], seconds: float = ANSWER_S) -> dict[str, Any]:
        """Returns the answer to the command that `send` sent; raises the errors of `ask`."""
        out = self._process.stdout
        assert out is not None
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([out], [], [], max(left, 0))
            if not ready:
                raise DeadlineExceeded(f"peer {self.name} did not answer {command['do']!r}")
            more = os.read(out.fileno(), 65536)
            if not more:
                raise PeerLost(f"peer {self.name} ended with {self._process.wait()}")
            line += more
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerLost(f"peer {self.name} cannot {command['do']}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Ends the process: closes its input and output, and kills it after 5 s."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
