"""Catalog of a directory: existing checkpoints, complete checkpoints, and removable files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fireflyer.checkpoint.directory.manifest import (
    DAMAGED,
    VERSION,
    Generation,
    Manifest,
    Versioned,
    decode,
)
from fireflyer.checkpoint.directory.manifest import parse_directory as step_of
from fireflyer.checkpoint.directory.manifest import parse_file as role_of
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

_log = get_logger("checkpoint")


class _File(NamedTuple):
    role: str
    generation: Generation
    name: str
    """Path from the storage's root."""


class Catalog:
    """Stateless view of a directory: each call reads the storage again.

    A data file may belong to several checkpoints, because an incremental save refers to files of
    its run's older saves. The file is removed once no remaining checkpoint can refer to it.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def fate(self) -> str:
        """Description of the effect of `set_aside`, for messages."""
        return f"moving it to {self.storage}/{DAMAGED}"

    def generations(self, step: int | None = None) -> list[Generation]:
        """Returns all generations with a manifest (of one step, if given), newest first."""
        found = [file.generation for file in self._files(step) if file.role == "manifest"]
        return sorted(found, reverse=True)

    def whole(self) -> Iterator[tuple[Generation, Manifest]]:
        """Yields, newest first, the generations with an intact manifest and files of the right
        size."""
        for generation in self.generations():
            try:
                yield generation, self.manifest(generation)
            except (CheckpointError, StorageError) as error:
                if isinstance(error, StorageError) and error.retryable:
                    raise  # the storage does not answer, which is no evidence about one checkpoint
                _log.debug("not counted: %s", error)

    def manifest(self, generation: Generation) -> Manifest:
        """Returns the manifest; checks the sizes of its data files.

        Raises:
            Corrupted: if the manifest is missing or damaged, or a data file is missing or has the
                wrong size.
            CheckpointError: if a different version of the format wrote it.
        """
        manifest = self.decoded(generation)
        self.check_files(manifest.files)
        return manifest

    def check_files(self, sizes: Mapping[str, int]) -> None:
        """Checks that the files exist with these sizes.

        Raises:
            Corrupted: if a file is missing or has another size.
        """
        for file, expected in sizes.items():
            size = self.storage.size(file)
            if size != expected:
                found = "is missing" if size is None else f"has {size} bytes"
                raise Corrupted(
                    f"{self.storage}/{file} {found}, but its manifest says {expected} bytes"
                )

    def decoded(self, generation: Generation) -> Manifest:
        """Returns the manifest without checking the data files. Raises like `manifest`."""
        name = generation.manifest
        where = f"{self.storage}/{name}"
        try:
            data = self.storage.read(name)
        except StorageError as error:
            if self.storage.size(name) is None:
                raise Corrupted(f"{where} is missing") from error
            raise
        version = decode(data, Versioned, where).version
        if version != VERSION:
            raise CheckpointError(
                f"{where} has format version {version}, but this Fireflyer reads {VERSION}: "
                f"use a Fireflyer that reads version {version}"
            )
        manifest = decode(data, Manifest, where)
        if manifest.step != generation.step:
            raise Corrupted(f"{where} belongs to step {manifest.step}")
        return manifest

    def set_aside(self, generation: Generation) -> None:
        """Moves a damaged checkpoint under damaged/, its manifest last.

        This order lets the next load complete an interrupted move. A file to which another
        checkpoint may refer stays until that checkpoint is found damaged, too.
        """
        try:
            files = self._files()
            needed = self._needed(files, without={generation})
            committed = {file.generation for file in files if file.role == "manifest"}
            for file in files:
                # `left`: a data file of an older save of this run, and that save has no checkpoint.
                # The file was kept only because the damaged checkpoint may refer to it.
                mine = file.generation == generation and file.role != "manifest"
                left = (
                    file.role == "data"
                    and file.generation not in committed
                    and file.generation.epoch == generation.epoch
                    and file.generation <= generation
                )
                if (mine or left) and not needed(file):
                    self.storage.rename(file.name, f"{DAMAGED}/{file.name}")
                    self.storage.delete(file.generation.directory)
            self.storage.rename(generation.manifest, f"{DAMAGED}/{generation.manifest}")
            self.storage.delete(generation.directory)
        except StorageError as error:
            _log.warning(
                "cannot set the damaged checkpoint aside; the next load skips it again: %s", error
            )

    def delete(self, generations: Sequence[Generation]) -> None:
        """Removes checkpoints: first manifests, then data files to which no other checkpoint may
        refer.

        This order ensures that an interruption leaves no checkpoint that looks complete.
        """
        for generation in generations:
            self.storage.delete(generation.manifest)
            self.storage.delete(generation.directory)
        if generations:
            self._remove_leftovers(max(generations), {"data", "part", "failed"})

    def sweep(self, newest: Generation) -> None:
        """Removes empty directories, and leftovers of killed or failed saves that are not newer
        than `newest`, which is committed."""
        self._remove_leftovers(newest, {"data", "part", "done", "failed", "temporary"})
        for directory in self.storage.list():
            if step_of(directory) is not None and not self.storage.list(directory):
                self.storage.delete(directory)

    def _remove_leftovers(self, newest: Generation, roles: set[str]) -> None:
        files, needed = self._settled()
        for file in files:
            if file.role == "done" and file.generation == newest:
                continue  # the file confirms the commit to its rank, which may still wait for it
            if file.role in roles and file.generation <= newest and not needed(file):
                self.storage.delete(file.name)
                self.storage.delete(file.generation.directory)

    def _settled(self) -> tuple[list[_File], Callable[[_File], bool]]:
        """Returns all files, and a predicate that is true for needed files.

        Another run may save or delete meanwhile. Therefore the files are listed again until the
        manifests stay the same. A new save refers only to its own files and to files of checkpoints
        that existed when the save began.
        """
        files = self._files()
        while True:
            needed = self._needed(files)
            again = self._files()
            if _manifests(again) == _manifests(files):
                return files, needed
            files = again

    def _needed(
        self, files: Sequence[_File], without: frozenset[Generation] | set[Generation] = frozenset()
    ) -> Callable[[_File], bool]:
        """Returns a predicate that is true for files to which a checkpoint may refer.

        A checkpoint with an unreadable manifest may refer to any data file of its own save and of
        its run's older saves.
        """
        named: set[str] = set()
        unread: list[Generation] = []
        for file in files:
            if file.role != "manifest" or file.generation in without:
                continue
            try:
                named.update(self.decoded(file.generation).files)
            except (Corrupted, CheckpointError):
                if self.storage.size(file.name) is not None:
                    unread.append(file.generation)

        def needed(file: _File) -> bool:
            return file.role == "data" and (
                file.name in named
                or any(
                    file.generation.epoch == one.epoch and file.generation <= one for one in unread
                )
            )

        return needed

    def _files(self, step: int | None = None) -> list[_File]:
        """Returns all files in the directories of saves."""
        names = self.storage.list() if step is None else [f"step-{step:012d}"]
        found = []
        for directory in names:
            number = step_of(directory)
            if number is None:
                continue
            for name in self.storage.list(directory):
                parsed = role_of(number, name)
                if parsed is not None:
                    found.append(_File(*parsed, f"{directory}/{name}"))
        return found


def newest_epoch(storage: Storage) -> int:
    """Returns the highest epoch in the names of save files, including damaged/; 0 if there are
    none."""
    epochs = [0]
    for root in ("", DAMAGED):
        for directory in storage.list(root):
            step = step_of(directory)
            if step is not None:
                names = storage.list(f"{root}/{directory}" if root else directory)
                parsed = (role_of(step, name) for name in names)
                epochs.extend(one[1].epoch for one in parsed if one is not None)
    return max(epochs)


def _manifests(files: Sequence[_File]) -> set[str]:
    return {file.name for file in files if file.role == "manifest"}
