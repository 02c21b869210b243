"""Freed memory stays in the process, unless its user tunes malloc otherwise."""

import ctypes
import os
import subprocess
import sys

import pytest

from fireflyer import allocator

BLOCK = 100 << 20


def mapped_blocks() -> int:
    """How many live blocks of malloc have a mapping of their own."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = [
            *(
                (name, ctypes.c_size_t)
                for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")
            ),
            *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
            ("keepcost", ctypes.c_size_t),
        ]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    return int(libc.mallinfo2().hblks)


def mapped_by_a_large_block() -> int:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = mapped_blocks()
    block = libc.malloc(BLOCK)
    assert block
    count = mapped_blocks() - before
    libc.free(block)
    return count


def printed(code: str, environment: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints after this module's names were imported."""
    code = f"from tests.support.test_allocator import *; {code}"
    clean = {name: value for name, value in os.environ.items() if name not in allocator.KEEP}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=clean | (environment or {}), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_large_blocks_stay_in_the_heap() -> None:
    code = "mapped_by_a_large_block(), allocator.follow({}), mapped_by_a_large_block()"
    assert printed(f"print({code})") == "1 True 0"


def test_a_program_reads_the_variables_when_it_starts() -> None:
    assert printed("print(mapped_by_a_large_block())", allocator.KEEP) == "0"


@pytest.mark.parametrize(
    ("environment", "done", "mapped"),
    [
        ({"MALLOC_MMAP_MAX_": "65536"}, True, 1),
        ({"MALLOC_MMAP_MAX_": "many"}, True, 1),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}, False, 1),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True, 0),
    ],
)
def test_the_user_has_the_last_word(environment: dict[str, str], done: bool, mapped: int) -> None:
    code = f"print(allocator.follow({environment}), mapped_by_a_large_block())"
    assert printed(code) == f"{done} {mapped}"


def test_other_threads_get_large_blocks_too() -> None:
    thread = "threading.Thread(target=lambda: print(mapped_by_a_large_block() in (0, 1)))"
    assert printed(f"import threading; allocator.follow({{}}); {thread}.start()") == "True"
