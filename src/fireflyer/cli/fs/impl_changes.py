"""Implementation of the `fireflyer fs` verbs that move bytes or change names."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import typer

from fireflyer.cli.progress import progress
from fireflyer.errors import ConfigError, FileError, StorageError
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Client, transfer
from fireflyer.fs3.client.discovery import attach
from fireflyer.program import described, report

PIECE = 4 << 20
THREADS = 16
STDIN, STDOUT = "/dev/stdin", "/dev/stdout"


def cat(where: str | None, paths: list[str]) -> int:
    out = sys.stdout.buffer

    def show(path: str) -> None:
        with fs.open(path, "rb") as file:
            memory = memoryview(bytearray(min(PIECE, file.size)))
            for offset in range(0, file.size, PIECE):
                out.write(memory[: file.pread_into(memory, offset)])

    with attach(where) as fs:
        code = each(paths, show)
    out.flush()
    return code


def put(where: str | None, sources: list[str], target: str, *, recursive: bool) -> int:
    to = _rooted(target)
    with attach(where) as fs:
        end = transfer.Remote(fs)
        if "-" in sources and (to.endswith("/") or fs.isdir(to)):
            raise ConfigError(f"standard input has no name: name the new file in {to}")
        paths = [STDIN if source == "-" else source for source in sources]
        return _copy(transfer.Local(), end, paths, to, recursive)


def get(where: str | None, sources: list[str], target: str, *, recursive: bool) -> int:
    with attach(where) as fs:
        paths, to = [_rooted(source) for source in sources], STDOUT if target == "-" else target
        return _copy(transfer.Remote(fs), transfer.Local(), paths, to, recursive)


def cp(where: str | None, sources: list[str], target: str, *, recursive: bool) -> int:
    with attach(where) as fs:
        end, paths = transfer.Remote(fs), [_rooted(source) for source in sources]
        inside = fs.isdir(_rooted(target))
        for path in paths:
            _refuse_itself(path, _within(_rooted(target), path) if inside else _rooted(target))
        return _copy(end, end, paths, _rooted(target), recursive)


def _copy(
    source: transfer.End,
    target: transfer.End,
    paths: list[str],
    to: str,
    recursive: bool,
) -> int:
    if (len(paths) > 1 or to.endswith("/")) and not target.isdir(to):
        raise ConfigError(f"{to} is not a directory")
    items: list[transfer.Item] = []
    code = each(
        paths,
        lambda path: items.extend(transfer.plan(source, path, target, to, recursive=recursive)),
    )
    with progress("copying", sum(item.size for item in items)) as advance:
        transfer.copy(source, target, items, advance)
    return code


def each(paths: list[str], act: Callable[[str], object]) -> int:
    """Applies `act` to every path. Reports a path that fails on stderr and continues.

    Returns:
        The exit code.
    """
    code = 0
    for path in paths:
        try:
            act(path)
        except BrokenPipeError:  # the reader of the output is gone
            raise
        except (FileError, StorageError, ConfigError, OSError) as error:
            code = report(described(error))
    return code


def mv(where: str | None, sources: list[str], target: str) -> int:
    to = _rooted(target)
    with attach(where) as fs:
        inside = fs.isdir(to)
        if (len(sources) > 1 or to.endswith("/")) and not inside:
            raise ConfigError(f"{to} is not a directory")

        def move(source: str) -> None:
            name = _within(to, source) if inside else to
            _refuse_itself(_rooted(source), name)
            fs.rename(_rooted(source), name)

        return each(sources, move)


def _within(folder: str, path: str) -> str:
    return os.path.join(folder, os.path.basename(os.path.normpath(path)))


def _refuse_itself(source: str, target: str) -> None:
    """Raises ConfigError if `source` would be copied or moved onto itself, or into itself."""
    source, target = os.path.normpath(source), os.path.normpath(target)
    if source == target:
        raise ConfigError(f"{source} and {target} are the same")
    if target.startswith(source.rstrip("/") + "/"):
        raise ConfigError(f"{source} cannot go into itself, {target}")


def rm(where: str | None, paths: list[str], *, recursive: bool, force: bool) -> int:
    def remove(path: str) -> None:
        if os.path.normpath(path) in ("/", "//"):
            raise ConfigError("the root cannot be moved or removed; give the paths of its entries")
        with contextlib.suppress(*([FileNotFoundError] if force else [])):
            _remove(fs, path, recursive=recursive)

    with attach(where) as fs:
        return each(list(map(_rooted, paths)), remove)


def _remove(fs: Client, path: str, *, recursive: bool) -> None:
    if not recursive:
        try:
            fs.unlink(path)
        except IsADirectoryError:
            raise ConfigError(f"{path} is a directory: remove it with --recursive") from None
        return
    folders: list[survey.Found] = []

    def files() -> Iterator[survey.Found]:
        for found in survey.tree(fs, path):
            if found.is_dir:
                folders.append(found)
            else:
                yield found

    with ThreadPoolExecutor(THREADS, "fs3-rm") as threads:
        for _ in threads.map(lambda one: _remove_one(fs, one), files()):
            pass
    for folder in reversed(folders):
        _remove_one(fs, folder)


def _remove_one(fs: Client, one: survey.Found) -> None:
    """Removes an entry by the inode of its parent directory; errors name the entry's path."""
    if one.above is None:
        (fs.rmdir if one.is_dir else fs.unlink)(one.path)
        return
    try:
        (fs.rmdir_at if one.is_dir else fs.unlink_at)(one.above.status.st_ino, one.name)
    except FileError as error:
        raise FileError(error.errno or errno.EIO, one.path) from error


def mkdir(where: str | None, paths: list[str], *, parents: bool) -> int:
    with attach(where) as fs:
        make = partial(fs.makedirs, exist_ok=True) if parents else fs.mkdir
        return each(list(map(_rooted, paths)), make)


def _rooted(path: str) -> str:
    """Returns the path with a leading slash: all paths of the file system start at its root."""
    if not path:
        raise typer.BadParameter("a path is empty; the root is /")
    return path if path.startswith("/") else f"/{path}"
