"""Copies bytes on several threads and prints the seconds; one answer for each line of input.

The copy has a separate process, because the C library reads GLIBC_TUNABLES when a process starts.
That variable makes memcpy bypass the caches with non-temporal stores. The end of the process also
frees the buffers.

Arguments: bytes, threads, maximum bytes of a buffer. Larger copies reuse the buffer.
"""

import ctypes
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor


def buffer(size: int) -> tuple[mmap.mmap, int]:
    """Returns memory whose pages are faulted in, and its address."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, size)
    return memory, address


def main() -> None:
    size, threads = int(sys.argv[1]), int(sys.argv[2])
    length = min(size, int(sys.argv[3]))
    _source, source = buffer(length)
    _target, target = buffer(length)
    cuts = [length * part // threads // 64 * 64 for part in range(threads)] + [length]

    def copy(part: int) -> None:
        left = size * (part + 1) // threads - size * part // threads
        while left > 0:
            count = min(left, cuts[part + 1] - cuts[part])
            ctypes.memmove(target + cuts[part], source + cuts[part], count)
            left -= count

    with ThreadPoolExecutor(threads) as pool:
        for _ in sys.stdin:
            began = time.perf_counter()
            list(pool.map(copy, range(threads)))
            sys.stdout.write(f"{time.perf_counter() - began}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
