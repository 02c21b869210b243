"""Redis server for the benchmark, and a minimal client: pipelined GETs into the caller's memory."""

import io
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fireflyer.errors import ConfigError, PeerLost

READY_S = 20.0


class Redis:
    """Process of redis-server on a Unix socket, without persistence; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Starts the process.

        Raises:
            ConfigError: redis-server is not installed.
            PeerLost: redis-server does not answer.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise ConfigError("redis-server is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / "s")
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + READY_S
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(path)
                break
            except OSError as error:
                self._socket.close()
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.close()
                    raise PeerLost(f"redis-server does not answer: {error}") from error
                time.sleep(0.02)
        self._stream = io.BufferedReader(self._socket.makefile("rb", buffering=0), 1 << 16)

    def set(self, key: bytes, value: bytes) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(value))
        self._socket.sendall(b"".join((head, value, b"\r\n")))
        if self._stream.readline() != b"+OK\r\n":
            raise PeerLost("redis-server rejected a SET")

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Reads the value of each key into its buffer, which must have the value's size."""
        asks = (b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys)
        self._socket.sendall(b"".join(asks))
        for buffer in buffers:
            if self._stream.readline() != b"$%d\r\n" % len(buffer):
                raise PeerLost("redis-server does not have the page")
            at = 0
            while at < len(buffer):
                at += self._stream.readinto(buffer[at:]) or 0
            self._stream.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
