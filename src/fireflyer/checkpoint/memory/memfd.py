"""Memory that outlives its writer: sealed memfds.

A keeper (keeper.py) is a process that holds replicas of saves and runs without torch. It imports
this module, so this module must not import torch.
"""

import fcntl
import mmap
import os
import socket
from collections.abc import Iterable

from fireflyer.errors import CheckpointError, NoSpace, PeerLost

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHUNK_BYTES = 4 << 20


class Memory:
    """Owner of a memfd's descriptor, which closes with the object. The memfd's memory lives while
    any process has a descriptor of it open."""

    def __init__(self, fd: int) -> None:
        """Takes ownership of `fd`."""
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def filled(cls, chunks: Iterable[bytes | memoryview]) -> "Memory":
        """Returns a sealed memfd that contains these chunks, back to back.

        Raises:
            NoSpace: if the kernel has no memory for them.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            memory = cls(os.memfd_create("fireflyer-replica", flags))
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(memory.fd, rest[:_CHUNK_BYTES]) :]
        except OSError as error:
            raise NoSpace(f"cannot allocate memory for a replica: {error.strerror}") from error
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, _SEALS)
        return memory

    @classmethod
    def received(cls, sock: socket.socket) -> "Memory":
        """Receives a memfd from the peer of a Unix socket.

        Raises:
            PeerLost: if the peer sends no memfd.
        """
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not data or not fds:
            raise PeerLost("the connection ended before a replica was passed")
        return cls(fds[0])

    def send(self, sock: socket.socket) -> None:
        socket.send_fds(sock, [b"m"], [self.fd])

    def require(self, size: int) -> None:
        """Checks the memfd's size and seals.

        Raises:
            CheckpointError: if the memfd has another size, or is not sealed against changes.
        """
        actual = os.fstat(self.fd).st_size
        if actual != size:
            raise CheckpointError(f"a replica has {actual} bytes: expected {size}")
        if fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise CheckpointError("a replica is not sealed")

    def view(self, size: int) -> memoryview:
        """Returns a read-only view of the bytes; they stay mapped while the view exists."""
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
