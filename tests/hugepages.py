"""Memory of this process in huge pages, so that forks of it cost little.

A fork and the end of its child take time for each page; a worker that has collected all tests has 100,000.
"""

import ctypes
import functools
from pathlib import Path

SIZE = 2 << 20
MADV_COLLAPSE = 25


@functools.cache
def collapse() -> None:
    """Asks the kernel (Linux 6.1) once for huge pages under the heap; does nothing where it refuses."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, _, *path = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        begin, end = -(-begin // SIZE) * SIZE, end // SIZE * SIZE
        if mode == "rw-p" and path in ([], ["[heap]"]) and begin < end:
            libc.madvise(begin, end - begin, MADV_COLLAPSE)
