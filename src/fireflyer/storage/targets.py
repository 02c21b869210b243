"""Output paths that users name: symlinks, pipes, devices and files.

A writer that renames a finished file to its target would replace a symlink, a FIFO or a device.
Therefore it must rename to `final_path`, or write into the stream of `open_stream`;
`replace_content` handles both cases.
"""

import contextlib
import errno
import os
import stat

from fireflyer.errors import ConfigError

_MOST_LINKS = 40


def final_path(path: str | os.PathLike[str]) -> str:
    """Resolves symlinks to the path of a file that may be replaced.

    Raises:
        ConfigError: the path is a pipe, FIFO, socket or device, or a symlink loop.
    """
    if is_stream(path):
        raise ConfigError(
            f"{os.fspath(path)} is a pipe or a device, not a file: write a file, then copy it there"
        )
    try:
        return behind_links(path)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: {error.strerror}: remove the link") from error


def behind_links(path: str | os.PathLike[str]) -> str:
    """Resolves symlinks; no file needs to exist at the path.

    Raises:
        OSError: ELOOP: the symlinks form a loop.
    """
    found = os.path.realpath(path)
    if os.path.islink(found):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    return found


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Returns whether the path is an open descriptor, or neither a file nor a directory."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_stream(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """Opens a stream; a descriptor of this process (/dev/stdout) keeps its position.

    Raises:
        OSError: the stream cannot be opened.
    """
    own = _descriptor(path)
    return os.dup(own) if own is not None else os.open(path, flags | os.O_CLOEXEC)


def replace_content(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces a file's content atomically, following symlinks, or writes to a stream.

    Raises:
        OSError: the file or stream cannot be written.
    """
    if is_stream(path):
        with open(open_stream(path), "wb") as stream:
            stream.write(content)
        return
    folder, name = os.path.split(behind_links(path))
    partial = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(content)
        os.replace(partial, os.path.join(folder, name))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """Returns the descriptor of this process to which the path leads, or None.

    A path such as /dev/stdout links to a descriptor, and the descriptor links to a file's name. A
    file that is opened by that name would lack the descriptor's position.
    """
    path = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        if folder == f"/proc/{os.getpid()}/fd" and name.isdigit():
            return int(name)
        try:
            path = os.path.join(folder, os.readlink(os.path.join(folder, name)))
        except OSError:  # not a symlink
            return None
    return None


def is_named(fd: int, path: str | os.PathLike[str]) -> bool:
    """Returns whether a path still names the file that is open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
