"""Processes that obey: a line of JSON in, a line of JSON out."""

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fireflyer.errors import DeadlineExceeded, PeerLost

ANSWER_S = 1800.0


class Obeying:
    """Such a process, from the constructor to `close`.

    Attributes:
        name: of what it is, in errors.
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
        """One command, one answer.

        Raises:
            PeerLost: the process ended, or it cannot do what was asked; with its words.
            DeadlineExceeded: no answer.
        """
        self.tell(command)
        return self.hear(command, seconds)

    def tell(self, command: dict[str, Any]) -> None:
        """Sends a command; `hear` must follow. Raises PeerLost."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise PeerLost(f"peer {self.name} ended") from None

    def hear(self, command: dict[str, Any], seconds: float = ANSWER_S) -> dict[str, Any]:
        """The answer to what was told; raises as `ask`."""
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
        """Ends the process: by the end of its input, and by force if that does not do."""
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
