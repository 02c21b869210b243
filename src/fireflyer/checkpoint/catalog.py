"""The checkpoints of a directory: which exist, which are whole, which may go."""

from collections.abc import Iterator, Sequence

from fireflyer.checkpoint.manifest import DAMAGED, VERSION, Generation, Manifest, decode
from fireflyer.checkpoint.manifest import parse_directory as step_of
from fireflyer.checkpoint.manifest import parse_file as role_of
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

_log = get_logger("checkpoint")


def surplus(newest_first: Sequence[Generation], keep: int) -> list[Generation]:
    """The whole checkpoints that a retention of the last `keep` lets go, oldest first."""
    return list(reversed(newest_first[keep:]))


class Catalog:
    """Looks at the directory anew in every call; holds no state."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def generations(self, step: int | None = None) -> list[Generation]:
        """All that have a manifest (of one step, if given), the newest first."""
        found = [generation for role, generation, _ in self._files(step) if role == "manifest"]
        return sorted(found, reverse=True)

    def whole(self) -> Iterator[Generation]:
        """Those with an undamaged manifest and data files of the right size, the newest first. Lazy."""
        return (generation for generation in self.generations() if self._is_whole(generation))

    def manifest(self, generation: Generation) -> Manifest:
        """
        Raises:
            Corrupted: if it is missing or damaged, or a data file is missing or has the wrong size.
            CheckpointError: if a later version of the format wrote it.
        """
        name = generation.manifest
        where = f"{self.storage}/{name}"
        if self.storage.size(name) is None:
            raise Corrupted(f"{where} is missing")
        manifest = decode(self.storage.read(name), Manifest, where)
        if manifest.version != VERSION:
            raise CheckpointError(
                f"{where} has format version {manifest.version}, this Fireflyer reads {VERSION}: update it"
            )
        for file, expected in manifest.file_sizes().items():
            size = self.storage.size(f"{generation.directory}/{file}")
            if size != expected:
                path = f"{self.storage}/{generation.directory}/{file}"
                found = "is missing" if size is None else f"has {size} bytes"
                raise Corrupted(f"{path} {found}, its manifest says {expected} bytes")
        return manifest

    def _is_whole(self, generation: Generation) -> bool:
        try:
            self.manifest(generation)
        except (Corrupted, CheckpointError) as error:
            _log.debug("not counted: %s", error)
            return False
        return True

    def set_aside(self, generation: Generation) -> None:
        """Moves a damaged checkpoint under damaged/, the manifest last, so that the next load ends what was
        interrupted."""
        files = [name for _, owner, name in self._files(generation.step) if owner == generation]
        files.sort(key=lambda name: name.startswith("manifest"))
        directory = generation.directory
        try:
            for name in files:
                self.storage.rename(f"{directory}/{name}", f"{DAMAGED}/{directory}/{name}")
            self.storage.delete(directory)
        except StorageError as error:
            _log.warning(
                "the damaged checkpoint stays where it is, and will be skipped again: %s", error
            )

    def delete(self, generation: Generation) -> None:
        """Removes a checkpoint. The manifest first, so that no interruption leaves one that looks whole."""
        self.storage.delete(generation.manifest)
        for _, owner, name in self._files(generation.step):
            if owner == generation:
                self.storage.delete(f"{generation.directory}/{name}")
        self.storage.delete(generation.directory)

    def sweep(self, newest: Generation) -> None:
        """Removes what killed or failed saves up to `newest`, which is committed, have left."""
        committed = set(self.generations())
        for role, generation, name in self._files():
            if generation <= newest and (
                generation not in committed or role in ("temporary", "part", "failed")
            ):
                self.storage.delete(f"{generation.directory}/{name}")
                self.storage.delete(generation.directory)

    def _files(self, step: int | None = None) -> list[tuple[str, Generation, str]]:
        """(role, generation, file name) of everything in the directories of saves."""
        names = self.storage.list() if step is None else [f"step-{step:012d}"]
        found = []
        for directory in names:
            number = step_of(directory)
            if number is None:
                continue
            for name in self.storage.list(directory):
                parsed = role_of(number, name)
                if parsed is not None:
                    found.append((*parsed, name))
        return found
