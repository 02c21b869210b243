"""Mounted file systems of the peers: packages in a separate folder, processes, a mount point."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from fireflyer.bench.harness.folder_scope import FolderScope
from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost

READY_S = 30.0
END_S = 10.0
_FUSE = ("fuse3", "libfuse3-3")


class Mounted(FolderScope):
    """Mounted file system with its processes, in a folder that the object creates and removes.

    The object is a context manager.

    Attributes:
        title: name with the version.
        root: mount point.
    """

    title: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.root = self.inner = self.folder / "mounted"
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Starts and mounts the file system.

        At this time the folder contains only the empty mount point.

        Raises:
            ConfigError, PeerLost, DeadlineExceeded: the file system cannot be mounted.
        """

    def __enter__(self) -> Self:
        if os.path.ismount(self.root):
            raise ConfigError(f"{self.root} is still mounted: umount {self.root}")
        return super().__enter__()

    def run(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        *,
        mounts: bool = False,
    ) -> None:
        """Starts a long-running process; with `mounts`, waits until the mount point is mounted.

        Raises:
            PeerLost: the process ended.
            DeadlineExceeded: nothing was mounted in time.
        """
        log = self.folder / f"{Path(command[0]).name}.log"
        with open(log, "wb") as words:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env={**os.environ, **environment},
            )
        self._processes.append(process)
        deadline = time.monotonic() + READY_S
        while mounts and not os.path.ismount(self.root):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.02)
                raise PeerLost(f"{self.title}: {log.stem} ended with {code}: {_end_of(log)}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self.title} is not mounted: {_end_of(log)}")

    def wait_for_port(self, host: str, port: int) -> None:
        """Waits until a process listens at the address; raises DeadlineExceeded."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, port), 1.0).close()
            except ConnectionRefusedError:
                time.sleep(0.02)
            else:
                return
        raise DeadlineExceeded(f"{self.title}: no process listens at {host}:{port}")

    def close(self) -> None:
        """Unmounts the file system, ends its processes in reverse order, removes its folder."""
        if os.path.ismount(self.root):
            quick = subprocess.run(["umount", self.root], capture_output=True, check=False)
            if quick.returncode != 0:
                subprocess.run(["umount", "-l", self.root], capture_output=True, check=False)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []
        if not os.path.ismount(self.root):
            shutil.rmtree(self.folder, ignore_errors=True)


def _end_of(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-300:] or "it printed nothing"


def check_can_mount() -> None:
    """Raises ConfigError if this process cannot mount a file system."""
    if os.geteuid() != 0:
        raise ConfigError("mounting a peer needs root")
    if not Path("/dev/fuse").exists():
        raise ConfigError("mounting a peer needs /dev/fuse")


def debian(folder: Path, packages: Sequence[str]) -> Path:
    """Returns the root of a tree with the files of these Debian packages; made at the first use.

    The packages are not installed on the machine.

    Raises:
        ConfigError: the packages cannot be fetched.
    """
    tree = folder / "root"
    if tree.exists():
        return tree
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"{packages[0]} is a Debian package, and this machine has no {program}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run_tool(["apt-get", "download", "-q", *packages], Path(place))
        made = Path(place) / "root"
        for package in sorted(Path(place).glob("*.deb")):
            run_tool(["dpkg", "-x", package, made], Path(place))
        made.rename(tree)
    return tree


def fuse(folder: Path) -> dict[str, str]:
    """Returns environment variables by which a program finds `fusermount`; fetches it if missing.

    Raises:
        ConfigError: `fusermount` cannot be fetched.
    """
    if shutil.which("fusermount") is not None:
        return {}
    tree = debian(folder / "fuse", _FUSE)
    link = tree / "bin" / "fusermount"
    if not link.exists():
        link.symlink_to("fusermount3")
    return {"PATH": f"{link.parent.absolute()}:{os.environ.get('PATH', os.defpath)}"}


def run_tool(command: Sequence[str | Path], folder: Path) -> None:
    """Runs a command to its end; raises ConfigError with its error output if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not end within 300 s") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        raise ConfigError(f"{' '.join(map(str, command))}: {said}")
