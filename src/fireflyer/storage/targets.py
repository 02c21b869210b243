"""Paths that a user names as output: links, and what is no file.

A writer that renames a finished file to its target would replace a link, a FIFO or a device by that
file. It writes to `final_path` instead, or into the stream of `open_stream`; `replace_content` does
both.
"""

import contextlib
import errno
import os
import stat

from fireflyer.errors import ConfigError

_MOST_LINKS = 40


def final_path(path: str | os.PathLike[str]) -> str:
    """Returns the path behind all links, whose file may be replaced.

    Raises:
        ConfigError: a pipe, FIFO, socket, device or a link that leads back to itself is there.
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
    """Returns the path behind all links; nothing need be there.

    Raises:
        OSError: with ELOOP, if a link leads back to itself.
    """
    found = os.path.realpath(path)
    if os.path.islink(found):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    return found


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Returns whether the path is an open descriptor, or something that is no file or directory."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_stream(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """Opens a stream; a descriptor of this process (/dev/stdout) goes on where it is.

    Raises:
        OSError: it cannot be opened.
    """
    own = _descriptor(path)
    return os.dup(own) if own is not None else os.open(path, flags | os.O_CLOEXEC)


def replace_content(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces a file's content in one step, behind links; a stream gets the bytes.

    Raises:
        OSError: it cannot be written.
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
    """Returns the descriptor of this process that the path leads to, or None.

    Such a link leads on to a name, but the descriptor has a position that another opening lacks.
    """
    path = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        if folder == f"/proc/{os.getpid()}/fd" and name.isdigit():
            return int(name)
        try:
            path = os.path.join(folder, os.readlink(os.path.join(folder, name)))
        except OSError:  # no link
            return None
    return None


def is_named(fd: int, path: str | os.PathLike[str]) -> bool:
    """Returns whether the path is still the name of an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
