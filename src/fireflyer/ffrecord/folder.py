"""Folder of files packed into one record file: one sample per file, and finally the tree of names.

As in High-Flyer's ffrecord, the last sample is `piouhjgbr` and a pickle of an OrderedDict. The
OrderedDict maps each name to the index of a file's sample, or to the OrderedDict of a directory.
name_tree.py reads the pickle without Python's unpickler.
"""

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from fireflyer.errors import ConfigError, Corrupted, FireflyerError, StorageError
from fireflyer.ffrecord.name_tree import Tree, read_names
from fireflyer.ffrecord.paths import PathName
from fireflyer.ffrecord.reader import Sample
from fireflyer.ffrecord.remote import open_records
from fireflyer.ffrecord.writer import FileWriter

_MAGIC = b"piouhjgbr"


class PackedFolder:
    """Reader of files in a record file that `pack_folder` or High-Flyer's ffrecord wrote.

    Paths are relative to the packed folder. Threads, fork and pickling: as `FileReader`.

    Args:
        ffr_file: the record file, or its URL.
        check_data: compare the CRC32 of every file that is read.

    Raises:
        Corrupted: the tree of names is damaged or holds anything but names.
        ConfigError: the file is a record file without a tree of names.
        StorageError: the file cannot be read.
    """

    def __init__(self, ffr_file: PathName, check_data: bool = True) -> None:
        self.reader = open_records(ffr_file, check_data)
        name = self.reader.fnames[0]
        last = self.reader.read_one(self.reader.n - 1).tobytes() if self.reader.n else b""
        if not last.startswith(_MAGIC):
            raise ConfigError(
                f"record file '{name}' is not a packed folder: it has no tree of names"
            )
        self._tree = _load_tree(last[len(_MAGIC) :], self.reader.n - 1, name)

    def num_files(self) -> int:
        return self.reader.n - 1

    def read_one(self, fname: PathName) -> Sample:
        """Returns the content of one file.

        Raises:
            StorageError: the folder has no such file, or the file cannot be read.
            Corrupted: the content does not match its checksum.
        """
        return self.reader.read_one(self._index(fname))

    def read(self, fnames: Sequence[PathName]) -> list[Sample]:
        """Returns the contents of many files, read in one batch; raises what `read_one` does."""
        return self.reader.read([self._index(name) for name in fnames])

    def list(
        self,
        path: PathName | None = None,
        list_file: bool = True,
        list_dir: bool = True,
        recursive: bool = False,
    ) -> list[str]:
        """Returns the names in the directory `path` (None: the root), relative to `path`, in
        packing order.

        Raises:
            StorageError: the folder has no such directory.
        """
        node = self._find(path or "")
        if not isinstance(node, dict):
            raise self._missing("directory", path or "")
        return list(_names(node, "", list_file, list_dir, recursive))

    def exists(self, path: PathName) -> bool:
        return self._find(path) is not None

    def is_file(self, path: PathName) -> bool:
        return isinstance(self._find(path), int)

    def is_dir(self, path: PathName) -> bool:
        return isinstance(self._find(path), dict)

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, path: PathName) -> "int | Tree | None":
        node: int | Tree | None = self._tree
        for part in PurePosixPath(path).parts:
            if not isinstance(node, dict):
                return None
            node = node.get(part)
        return node

    def _index(self, path: PathName) -> int:
        node = self._find(path)
        if not isinstance(node, int):
            raise self._missing("file", path)
        return node

    def _missing(self, kind: str, path: PathName) -> StorageError:
        return StorageError(
            f"packed folder '{self.reader.fnames[0]}' has no {kind} '{path}': "
            "`list(recursive=True)` shows what it has"
        )


def open_folder(ffr_file: PathName, check_data: bool = True) -> PackedFolder:
    """Opens a packed folder; see `PackedFolder`."""
    return PackedFolder(ffr_file, check_data)


def pack_folder(folder: PathName, out_file: PathName, verbose: bool = False) -> None:
    """Packs all files below `folder` into one record file; follows symbolic links.

    Files are in sorted depth-first order, so equal folders give equal files. Empty directories are
    kept; modes, owners and times are not. With `verbose`, prints one line per file to stderr.

    Raises:
        ConfigError: `folder` is not a directory, or contains an entry that is neither file nor
            directory, or a link that leads back to an enclosing directory.
        NoSpace, StorageError: a file cannot be read, or the record file cannot be written.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"cannot pack '{root}': it is not a directory")
    files: list[Path] = []
    try:
        tree = _scan(root, files, set())
        with FileWriter(out_file, len(files) + 1) as writer:
            for number, path in enumerate(files):
                writer.write_one(path.read_bytes())
                if verbose:
                    sys.stderr.write(f"{number + 1}/{len(files)} {path}\n")
            writer.write_one(_MAGIC + pickle.dumps(tree, protocol=4))
    except FireflyerError:  # some FireflyerErrors are also OSErrors
        raise
    except OSError as error:
        raise StorageError(f"cannot pack folder '{root}': {error}; nothing was written") from error


def _scan(folder: Path, files: list[Path], around: set[tuple[int, int]]) -> "OrderedDict[str, Any]":
    """Returns the tree of `folder`; appends its files in the order of their indices."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in around:
        raise ConfigError(f"cannot pack '{folder}': it is a link to an enclosing directory")
    tree: OrderedDict[str, Any] = OrderedDict()
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_dir():
            tree[name] = _scan(path, files, around | {identity})
        elif path.is_file():
            tree[name] = len(files)
            files.append(path)
        else:
            raise ConfigError(f"cannot pack '{path}': it is neither a file nor a directory")
    return tree


def _names(
    tree: Tree, prefix: str, list_file: bool, list_dir: bool, recursive: bool
) -> Iterator[str]:
    for name, node in tree.items():
        if list_file if isinstance(node, int) else list_dir:
            yield prefix + name
        if recursive and isinstance(node, dict):
            yield from _names(node, f"{prefix}{name}/", list_file, list_dir, recursive)


def _load_tree(data: bytes, files: int, where: str) -> Tree:
    try:
        return read_names(data, files)
    except ValueError as error:
        raise Corrupted(
            f"packed folder '{where}': its tree of names is invalid ({error}); "
            "do not trust this file, pack the folder again"
        ) from error
