"""Mounted directories for the benchmark: our mount, and libfuse's `passthrough_hp`."""

import sys
from pathlib import Path

from fireflyer.bench.fs.cluster import FileSystem
from fireflyer.bench.peers.mounting import Mounted, check_can_mount
from fireflyer.errors import ConfigError
from fireflyer.fs3.mount import program


class OurMount(Mounted):
    """Our file system in one process, mounted by another process, as users start them.

    Attributes:
        files: the file system, for clients that bypass the mount.
    """

    title = "Fireflyer"

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if this build or this machine cannot mount."""
        super().__init__(folder)
        check_can_mount()
        if not program.library().exists():
            raise ConfigError("this build of Fireflyer cannot mount: it was built without libfuse3")
        self.files = FileSystem(self.folder / "fs")

    def start(self) -> None:
        self.files.__enter__()
        command: list[str | Path] = [sys.executable, "-P", "-m", "fireflyer.cli", "fs", "mount"]
        command.append(self.root)
        self.run([*command, "--foreground", "--dir", self.files.where], {}, mounts=True)

    def close(self) -> None:
        super().close()
        self.files.close()


class Passthrough(Mounted):
    """Folder of this disk, mounted by a `passthrough_hp` that the user has built.

    Args:
        folder: folder of the mounted files and of the mount point.
        program: the program, built from libfuse's folder `example`.
    """

    title = "passthrough_hp"

    def __init__(self, folder: Path, program: Path | None) -> None:
        """Raises ConfigError if there is no such program, or it cannot mount here."""
        super().__init__(folder)
        check_can_mount()
        if program is None or not program.is_file():
            raise ConfigError(
                "name the program with --passthrough FILE; it is one of libfuse's examples"
            )
        self._program = program.absolute()

    def start(self) -> None:
        source = self.folder / "source"
        source.mkdir()
        self.run([self._program, "--foreground", source, self.root], {}, mounts=True)
