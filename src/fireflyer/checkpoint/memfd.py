"""Memory that outlives its writer: sealed memfds. No torch; a keeper imports this."""

import fcntl
import mmap
import os
import socket
from collections.abc import Iterable

from fireflyer.errors import CheckpointError, NoSpace, PeerLost

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHUNK_BYTES = 4 << 20


class Memory:
    """A memfd; closed when nobody refers to it any more. Its pages last as long as any descriptor of it."""

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def filled(cls, chunks: Iterable[bytes | memoryview]) -> "Memory":
        """A sealed one with these bytes, back to back.

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
            raise NoSpace(f"no memory for a replica: {error.strerror}") from error
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, _SEALS)
        return memory

    @classmethod
    def received(cls, sock: socket.socket) -> "Memory":
        """One that the other side of a Unix socket sends.

        Raises:
            PeerLost: if it sends none.
        """
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not data or not fds:
            raise PeerLost("the connection ended before a replica was passed")
        return cls(fds[0])

    def send(self, sock: socket.socket) -> None:
        socket.send_fds(sock, [b"m"], [self.fd])

    def require(self, size: int) -> None:
        """
        Raises:
            CheckpointError: if it has another size, or somebody could still change it.
        """
        actual = os.fstat(self.fd).st_size
        if actual != size:
            raise CheckpointError(f"a replica of {actual} bytes was announced as {size}")
        if fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise CheckpointError("a replica is not sealed")

    def view(self, size: int) -> memoryview:
        """Its bytes, read-only; they stay mapped as long as the view lives."""
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
