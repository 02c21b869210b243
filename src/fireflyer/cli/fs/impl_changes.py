"""Implementation of the `fireflyer fs` verbs that move bytes or change names."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import typer

from fireflyer.cli.printing import progress
from fireflyer.errors import ConfigError, FileError
from fireflyer.fs3 import survey, transfer
from fireflyer.fs3.client import Client
from fireflyer.fs3.discovery import attach

PIECE = 4 << 20
THREADS = 16


def cat(where: str | None, paths: list[str]) -> None:
    out = sys.stdout.buffer
    with attach(where) as fs:
        for path in paths:
            with fs.open(path, "rb") as file:
                memory = memoryview(bytearray(min(PIECE, file.size)))
                for offset in range(0, file.size, PIECE):
                    out.write(memory[: file.pread_into(memory, offset)])
    out.flush()


def put(where: str | None, sources: list[str], target: str, *, recursive: bool) -> None:
    with attach(where) as fs:
        _copy(transfer.Local(), transfer.Remote(fs), sources, _rooted(target), recursive)


def get(where: str | None, sources: list[str], target: str, *, recursive: bool) -> None:
    with attach(where) as fs:
        paths = [_rooted(source) for source in sources]
        _copy(transfer.Remote(fs), transfer.Local(), paths, target, recursive)


def cp(where: str | None, sources: list[str], target: str, *, recursive: bool) -> None:
    with attach(where) as fs:
        end, paths = transfer.Remote(fs), [_rooted(source) for source in sources]
        inside = fs.isdir(_rooted(target))
        for path in paths:
            _refuse_itself(path, _within(_rooted(target), path) if inside else _rooted(target))
        _copy(end, end, paths, _rooted(target), recursive)


def _copy(
    source: transfer.End,
    target: transfer.End,
    paths: list[str],
    to: str,
    recursive: bool,
) -> None:
    if (len(paths) > 1 or to.endswith("/")) and not target.isdir(to):
        raise ConfigError(f"{to} is not a directory")
    items = [
        item
        for path in paths
        for item in transfer.plan(source, path, target, to, recursive=recursive)
    ]
    with progress("copying", sum(item.size for item in items)) as advance:
        transfer.copy(source, target, items, advance)


def mv(where: str | None, sources: list[str], target: str) -> None:
    to = _rooted(target)
    with attach(where) as fs:
        inside = fs.isdir(to)
        if (len(sources) > 1 or to.endswith("/")) and not inside:
            raise ConfigError(f"{to} is not a directory")
        for source in sources:
            name = _within(to, source) if inside else to
            _refuse_itself(_rooted(source), name)
            fs.rename(_rooted(source), name)


def _within(folder: str, path: str) -> str:
    return os.path.join(folder, os.path.basename(os.path.normpath(path)))


def _refuse_itself(source: str, target: str) -> None:
    """Raises ConfigError if `source` would be copied or moved onto itself, or into itself."""
    source, target = os.path.normpath(source), os.path.normpath(target)
    if source == target:
        raise ConfigError(f"{source} and {target} are the same")
    if target.startswith(source.rstrip("/") + "/"):
        raise ConfigError(f"{source} cannot go into itself, {target}")


def rm(where: str | None, paths: list[str], *, recursive: bool, force: bool) -> None:
    with attach(where) as fs:
        for path in map(_rooted, paths):
            if os.path.normpath(path) in ("/", "//"):
                raise ConfigError(
                    "the root cannot be moved or removed; give the paths of its entries"
                )
            with contextlib.suppress(*([FileNotFoundError] if force else [])):
                _remove(fs, path, recursive=recursive)


def _remove(fs: Client, path: str, *, recursive: bool) -> None:
    if not recursive:
        fs.unlink(path)
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


def mkdir(where: str | None, paths: list[str], *, parents: bool) -> None:
    with attach(where) as fs:
        for path in map(_rooted, paths):
            if parents:
                fs.makedirs(path, exist_ok=True)
            else:
                fs.mkdir(path)


def _rooted(path: str) -> str:
    """Returns the path with a leading slash: all paths of the file system start at its root."""
    if not path:
        raise typer.BadParameter("a path is empty; the root is /")
    return path if path.startswith("/") else f"/{path}"
