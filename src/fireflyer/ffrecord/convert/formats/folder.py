"""Folder of files, with sub-folders as classes."""

import os
from collections.abc import Iterator

import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.source import Column, Row, ahead, is_unicode, read_file, reading

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class FolderSource:
    """Source of a folder's files in sorted depth-first order; follows links, skips hidden files.

    With sub-folders the rows are {data, label, class, name}. The class is the first folder, the
    label its index in sorted order (torchvision's ImageFolder). Without sub-folders the rows are
    {data, name}. The column `data` is called `image` if every file has the suffix of an image.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Lists the files.

        Raises:
            ConfigError: no files, files both beside and inside sub-folders, an entry that is
                neither file nor folder, or a link back to an enclosing folder.
            StorageError: the folder cannot be listed.
        """
        self.name = os.fspath(folder)
        self.paths: tuple[str, ...] = (self.name,)
        try:
            self._files = list(_walk(self.name))
        except OSError as error:
            raise reading(error.filename or folder, error) from error
        if not self._files:
            raise ConfigError(f"{self.name}: the folder holds no files")
        self.length: int | None = len(self._files)
        tops = {name.partition("/")[0] for name in self._files if "/" in name}
        self._labels = {name: number for number, name in enumerate(sorted(tops))}
        if tops and any("/" not in name for name in self._files):
            raise ConfigError(
                f"{self.name}: some files are outside the class folders: move them into one"
            )
        images = all(name.lower().endswith(IMAGES) for name in self._files)
        self._data = "image" if images else "data"
        classes = (Column("label", "int64"), Column("class", "str")) if tops else ()
        self.columns = (Column(self._data, "bytes"), *classes, Column("name", "str"))

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of their labels."""
        return list(self._labels)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        return ahead(self._load, len(self._files), jobs)

    def _load(self, index: int) -> Row:
        name = self._files[index]
        row: Row = {self._data: read_file(os.path.join(self.name, name))}
        if self._labels:
            top = name.partition("/")[0]
            row |= {"label": np.array(self._labels[top], np.int64), "class": top}
        return row | {"name": name}


def _walk(
    folder: str, before: str = "", around: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[str]:
    """Yields file names relative to the root: first the files of a folder, then those of each
    sub-folder.

    Args:
        folder: path of the folder.
        before: its path relative to the root, with a trailing slash; "" for the root.
        around: (device, inode) of the enclosing folders.
    """
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in around:
        raise ConfigError(f"cannot pack '{folder}': it is a link to an enclosing directory")
    below = []
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = entry.name
        if name.startswith("."):
            continue
        if not is_unicode(name):
            raise ConfigError(f"{folder}: the name {name!r} is not UTF-8: rename it")
        if entry.is_dir():
            below.append(name)
            continue
        if not entry.is_file():
            raise ConfigError(f"cannot pack '{entry.path}': it is neither a file nor a directory")
        yield before + name
    for name in below:
        yield from _walk(os.path.join(folder, name), f"{before}{name}/", around | {identity})
