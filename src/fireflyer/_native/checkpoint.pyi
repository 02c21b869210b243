"""
Staging of checkpoints: the arena, and copies into it by native threads.
"""

from typing import Annotated

import numpy
from numpy.typing import NDArray

import fireflyer._native.hfreduce


class Copy:
    """
    Copy in flight into an arena. Destroying it skips blocks that have not begun and waits for the others.
    """

    def wait(self, upto: int | None = None, help: bool = True) -> None:
        """
        Waits until the pieces' bytes in [0, upto) of the arena are in place (default: all). With `help`, the calling thread copies, too. Raises Cancelled in a forked child.
        """

    @property
    def staged(self) -> int:
        """The pieces' bytes in [0, staged) of the arena are in place."""

    @property
    def done(self) -> bool:
        """True when all pieces are in place and no source is read any more."""

    @property
    def pieces_done(self) -> int:
        """Number of leading pieces that are in place."""

    def changed(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """
        bool[n]: true for pieces that differ from the arena's previous contents. Call it after wait(), on a copy with compare=True.
        """

class Arena:
    """Memory kept from save to save. Only one thread at a time may use it."""

    def __init__(self) -> None: ...

    def reserve(self, size: int) -> None:
        """
        Makes the arena at least `size` bytes large and populates all pages. The arena's bytes are lost when it grows; views and copies of the old memory stay valid. Raises NoSpace if memory is short.
        """

    def memory(self, size: int) -> memoryview:
        """
        Returns a writable, page-aligned view on the first `size` bytes, which keeps them alive.
        """

    def pin(self, device: fireflyer._native.hfreduce.Device) -> None:
        """
        Pins the memory for the device, until the memory is freed or replaced by a larger one. A second call does nothing. Raises CollectiveError if the device reports an error.
        """

    @property
    def capacity(self) -> int:
        """Bytes; 0 before the first reserve() and in a forked child."""

    def start(self, pieces: Annotated[NDArray[numpy.int64], dict(shape=(None, 3), order='C', device='cpu', writable=False)], threads: int = 0, compare: bool = False, background: bool = False) -> Copy:
        """
        Starts to copy pieces on native threads (0: one for each core). `pieces`: int64[n, 3] of (address of the source, offset in the arena, bytes), ascending by offset and disjoint. The sources must stay alive and unchanged until the copy is done or destroyed. compare: compare with the arena's contents, see Copy.changed(). background: only one thread copies, on idle cores, until a caller waits with `help`.
        """

class DeviceCopy:
    """
    Copy in flight from a device into an arena. Destroying it waits for the work in the device's stream.
    """

    def wait(self, upto: int | None = None) -> None:
        """
        Waits until the pieces' bytes in [0, upto) of the arena are in place (default: all). Raises CollectiveError if the device has failed, Cancelled in a forked child.
        """

    @property
    def staged(self) -> int:
        """The pieces' bytes in [0, staged) of the arena are in place."""

    @property
    def done(self) -> bool:
        """True when all pieces are in place and no source is read any more."""

    def changed(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """
        bool[n]: true for pieces that differ from the arena's previous contents. Call it after wait(), on a copy with compare=True.
        """

class DeviceLane:
    """A stream of a device on which copies into arenas run."""

    def __init__(self, device: fireflyer._native.hfreduce.Device) -> None: ...

    def start(self, arena: Arena, pieces: Annotated[NDArray[numpy.int64], dict(shape=(None, 3), order='C', device='cpu', writable=False)], stream: int, compare: bool = False, follow: bool = False) -> DeviceCopy:
        """
        Starts to copy pieces of the device's memory after the current work in `stream`. `pieces`: int64[n, 3] of (address of the source, offset in the arena, bytes), ascending by offset and disjoint. The sources must stay alive and unchanged until the copy is done. compare: compare with the arena's contents, see DeviceCopy.changed(). follow: `stream` waits for the copy. Raises CollectiveError if the device reports an error.
        """
