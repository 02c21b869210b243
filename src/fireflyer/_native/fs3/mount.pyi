"""The kernel's requests to a mounted directory"""

from collections.abc import Callable

from typing_extensions import Buffer

import fireflyer._native.fs3.client


class Request:
    """Call of the kernel for names, attributes or open files."""

    @property
    def op(self) -> str: ...

    @property
    def inode(self) -> int: ...

    @property
    def other(self) -> int: ...

    @property
    def name(self) -> bytes: ...

    @property
    def data(self) -> bytes: ...

    @property
    def flags(self) -> int: ...

    @property
    def mode(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...

    @property
    def atime(self) -> int: ...

    @property
    def mtime(self) -> int: ...

    @property
    def caller_uid(self) -> int: ...

    @property
    def caller_gid(self) -> int: ...

    @property
    def caller_pid(self) -> int: ...

PAGE: int = 1024

class FileState:
    """State of an inode, shared by all open files of it. Any thread."""

    def __init__(self, inode: int, map: fireflyer._native.fs3.client.FileMap, end: int) -> None: ...

    @property
    def inode(self) -> int: ...

    @property
    def end(self) -> int:
        """Length in bytes that this mount knows."""

    @end.setter
    def end(self, arg: int, /) -> None: ...

    @property
    def widened(self) -> int:
        """Limit of writes: no byte at or beyond it is written."""

    @widened.setter
    def widened(self, arg: int, /) -> None: ...

    @property
    def writers(self) -> int:
        """Writes in flight."""

    @property
    def dirty(self) -> bool:
        """True if bytes were written since `take`."""

    @property
    def written_ns(self) -> int:
        """Time of the last write, in ns since the epoch."""

    def take(self) -> int:
        """Returns the largest end written since the last call, or -1."""

    def reach(self, end: int) -> None:
        """Raises the file's `end` to at least this value."""

    def wrote(self, end: int) -> None:
        """Records a write up to `end`."""

class Mount:
    """Answers the kernel's requests for a directory. Any thread."""

    def __init__(self, engine: fireflyer._native.fs3.client.Engine, call: Callable[[Request], object], finish: Callable[[int, fireflyer._native.fs3.client.Pieces, bool, int], int], attempt_s: float, slowest: float) -> None:
        """
        call(request) returns an error number or the answer. finish(inode, pieces, write, caller_pid) finishes pieces that failed or touched a hole, and returns an error number. attempt_s: timeout of an attempt in seconds, to which the bytes at the rate `slowest` (bytes/s) are added.
        """

    def mount(self, library: str, directory: str, source: str, attributes_s: float, others: bool) -> None:
        """
        library: path of libff_fuse.so. source: name in /proc/mounts. others: allow other users. Raises StorageError.
        """

    def work(self) -> None:
        """Answers requests until the directory is unmounted or `stop` is called."""

    def stop(self) -> None: ...

    def close(self) -> None:
        """Unmounts the directory. No thread may be in `work`."""

    def read(self, file: FileState, offset: int, memory: Buffer) -> int:
        """
        Reads into memory, as the kernel's READ does; returns the bytes read or a negative error number.
        """

    def write(self, file: FileState, offset: int, memory: Buffer) -> int:
        """
        Writes memory, as the kernel's WRITE does; returns the bytes written or a negative error number.
        """
