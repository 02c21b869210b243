"""
Staging of checkpoints: the arena, and copies into it by native threads.
"""

from typing import Annotated

import numpy
from numpy.typing import NDArray

import fireflyer._native.hfreduce


class Copy:
    """
    A copy into an arena that is under way. Letting it go leaves out what has not begun and waits for the rest.
    """

    def wait(self, upto: int | None = None, help: bool = True) -> None:
        """
        Returns when the pieces' bytes in [0, upto) of the arena are in place (default: all); copies itself meanwhile, if `help`. Raises Cancelled in a forked child.
        """

    @property
    def staged(self) -> int:
        """The pieces' bytes in [0, staged) of the arena are in place."""

    @property
    def done(self) -> bool:
        """All is in place, and no source is touched any more."""

    @property
    def pieces_done(self) -> int:
        """The first so many pieces are in place."""

    def changed(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """
        bool[n]: which pieces differ from what the arena held before. After wait(), and only of a copy with compare=True.
        """

class Arena:
    """Memory kept from save to save; one thread at a time."""

    def __init__(self) -> None: ...

    def reserve(self, size: int) -> None:
        """
        Makes the arena at least `size` bytes large, all pages present. Its bytes are lost when it grows; views and copies of the old ones stay valid. Raises NoSpace where the memory is short.
        """

    def memory(self, size: int) -> memoryview:
        """The first `size` bytes, writable, page-aligned; keeps them alive."""

    def pin(self, device: fireflyer._native.hfreduce.Device) -> None:
        """
        Pins the memory for the device, once, until it goes: when the arena grows, or with it. Raises CollectiveError if the device refuses.
        """

    @property
    def capacity(self) -> int:
        """Bytes; 0 before the first reserve() and in a forked child."""

    def start(self, pieces: Annotated[NDArray[numpy.int64], dict(shape=(None, 3), order='C', device='cpu', writable=False)], threads: int = 0, compare: bool = False, background: bool = False) -> Copy:
        """
        Starts to copy pieces, int64[n, 3] of (address of the source, offset in the arena, bytes), ascending by offset and disjoint, on native threads (0: as many as cores). The sources must stay alive and unchanged until the copy is done or let go. compare: the arena holds older bytes, see Copy.changed(). background: one thread on idle cores, until somebody waits and helps.
        """

class DeviceCopy:
    """
    A copy from a device into an arena that is under way. Letting it go waits for what is in the device's stream.
    """

    def wait(self, upto: int | None = None) -> None:
        """
        Returns when the pieces' bytes in [0, upto) of the arena are in place (default: all). Raises CollectiveError if the device has failed, Cancelled in a forked child.
        """

    @property
    def staged(self) -> int:
        """The pieces' bytes in [0, staged) of the arena are in place."""

    @property
    def done(self) -> bool:
        """All is in place, and no source is touched any more."""

    def changed(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """
        bool[n]: which pieces differ from what the arena held before. After wait(), and only of a copy with compare=True.
        """

class DeviceLane:
    """A stream of a device on which copies into arenas run."""

    def __init__(self, device: fireflyer._native.hfreduce.Device) -> None: ...

    def start(self, arena: Arena, pieces: Annotated[NDArray[numpy.int64], dict(shape=(None, 3), order='C', device='cpu', writable=False)], stream: int, compare: bool = False, follow: bool = False) -> DeviceCopy:
        """
        Starts to copy pieces of the device's memory, int64[n, 3] of (address of the source, offset in the arena, bytes), ascending by offset and disjoint, behind what is in `stream` now. The sources must stay alive and unchanged until the copy is done. compare: the arena holds older bytes, see DeviceCopy.changed(). follow: `stream` waits for the copy. Raises CollectiveError if the device refuses.
        """
