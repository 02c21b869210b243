"""What was written survives a power cut."""

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def sync_names(folder: Path) -> None:
    """The names in one folder.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Everything on the file system of a folder, in one call: for thousands of files that is what makes the
    difference between one commit of its journal and thousands.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
