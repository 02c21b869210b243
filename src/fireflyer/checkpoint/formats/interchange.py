"""Import and export: detects a path's format, writes other formats, extracts parts of states."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any, BinaryIO, Literal

import torch

from fireflyer.checkpoint.formats import dcp_directory, safetensors
from fireflyer.checkpoint.formats.dcp_keys import reason_of, safe_classes
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.contents import Contents, InMemory, at
from fireflyer.checkpoint.state.tree import Container, Node, Path, Tensor, path_name
from fireflyer.errors import CheckpointError, ConfigError, NoSpace, StorageError
from fireflyer.storage import DirectoryStorage
from fireflyer.storage.targets import final_path

Kind = Literal["safetensors", "dcp", "torch"]
KINDS: tuple[Kind, ...] = ("safetensors", "dcp", "torch")


def open_foreign(source: str | os.PathLike[str]) -> Contents:
    """Opens a file or folder of safetensors, DCP or torch.save. Runs no code from it.

    Raises:
        ConfigError: if the path is in another format.
        Corrupted: if the data is damaged.
        CheckpointError: if the data contains an item that a state cannot hold.
        StorageError: if the data cannot be read.
    """
    path = FilePath(source)
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if path.is_dir():
        if (path / dcp_directory.METADATA).is_file():
            return dcp_directory.DcpDirectory(path)
        if any(path.glob("*.safetensors")):
            return safetensors.SafetensorsFiles(path)
        raise ConfigError(f"{path} has neither {dcp_directory.METADATA} nor a .safetensors file")
    if path.suffix == ".safetensors":
        return safetensors.SafetensorsFiles(path)
    return _torch_file(path)


def _torch_file(path: FilePath) -> Contents:
    """Loads a torch.save file; maps it into memory if its format allows that."""
    try:
        with safe_classes():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a pickle may raise anything
        raise CheckpointError(
            f"{path} is not a torch.save file of plain data: {reason_of(error)}"
        ) from error
    return InMemory(state, str(path))


def _is_zip(path: FilePath) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def export(
    contents: Contents,
    out: str | os.PathLike[str],
    kind: Kind,
    *,
    shard_bytes: int = safetensors.SHARD_BYTES,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Writes contents in another format.

    `torch` needs memory for the whole state; the other formats need memory for a few blocks.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError: if the format cannot hold the contents.
        ConfigError: if a pipe or a device is at `out`.
        StorageError: if the contents cannot be read or written.
    """
    path, place = FilePath(out), final_path(out)
    if path.is_symlink():  # the link stays, and its target is replaced
        path = FilePath(place)
    if kind == "safetensors":
        one = FilePath(out).suffix == safetensors.SUFFIX
        return safetensors.write(
            contents, path, one_file=one, shard_bytes=shard_bytes, advance=advance
        )
    if kind == "dcp":
        dcp_directory.write(contents, path, advance)
        return [str(path / name) for name in sorted(os.listdir(path))]
    state = contents.state()
    storage = DirectoryStorage(path.parent)
    partial = f".{path.name}.tmp"
    try:
        with (storage.root / partial).open("wb") as opened:
            file: Any = _ErrorRecordingFile(opened)
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch raises it for a failed write
                raise file.failure or error from error
            opened.flush()
            os.fsync(opened.fileno())
        storage.rename(partial, path.name)
    except StorageError:  # before OSError, because NoSpace is both
        raise
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"{reason}; free some space and try again") from error
        raise StorageError(reason) from error
    except RuntimeError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    finally:
        with contextlib.suppress(StorageError):
            storage.delete(partial)
    return [str(path)]


class _ErrorRecordingFile:
    """File for torch.save that records the error of a failed write, which torch does not report."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()


class Part(Contents):
    """Contents under one key, with paths relative to the key."""

    def __init__(self, inner: Contents, name: str) -> None:
        """Selects the part.

        Args:
            name: the name of a dict or list, e.g. "model" or "optimizer.state".

        Raises:
            ConfigError: if there is no such dict or list.
        """
        self._inner, self._name = inner, name
        roots = [
            node.path
            for node in inner.nodes
            if isinstance(node, Container) and path_name(node.path) == name
        ]
        if not roots:
            tops = sorted(
                path_name(n.path)
                for n in inner.nodes
                if isinstance(n, Container) and len(n.path) == 1
            )
            there = f"; it has {', '.join(tops)}" if tops else ""
            raise ConfigError(f"{inner} has no dict or list {name!r}{there}")
        root = roots[0]
        self._whole: dict[Path, Tensor] = {}
        self.nodes = [
            self._cut(node, len(root)) for node in inner.nodes if node.path[: len(root)] == root
        ]

    def __str__(self) -> str:
        return f"{self._name} of {self._inner}"

    def _cut(self, node: Node, depth: int) -> Node:
        path = node.path[depth:]
        if isinstance(node, Tensor):
            self._whole[path] = node
        return at(path, node)

    def boxes(self, node: Tensor) -> list[Box]:
        return self._inner.boxes(self._whole[node.path])

    def read(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        return self._inner.read(self._whole[node.path], box)
