"""Mounted file systems of others: packages in a folder of their own, processes, a mount point."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost

READY_S = 30.0
END_S = 10.0
_FUSE = ("fuse3", "libfuse3-3")


class Mounted(ABC):
    """A file system with the processes that make it, in a folder that is made and removed; a context manager.

    Attributes:
        title: with the version.
        root: where it is mounted.
    """

    title: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.root = self.folder / "mounted"
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Makes and mounts it; the folder is there and holds nothing but the empty mount point.

        Raises:
            ConfigError, PeerLost, DeadlineExceeded.
        """

    def __enter__(self) -> Self:
        if os.path.ismount(self.root):
            raise ConfigError(f"{self.root} is still mounted: umount {self.root}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.root.mkdir(parents=True)
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        *,
        mounts: bool = False,
    ) -> None:
        """Starts a process that stays; with `mounts` it returns when the mount point is mounted.

        Raises:
            PeerLost: it ended. DeadlineExceeded: nothing was mounted.
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
        """Until somebody listens there; raises DeadlineExceeded."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, port), 1.0).close()
            except ConnectionRefusedError:
                time.sleep(0.02)
            else:
                return
        raise DeadlineExceeded(f"{self.title}: nobody listens at {host}:{port}")

    def close(self) -> None:
        """Unmounts it, ends its processes, the last one first, and removes its folder."""
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
    return " ".join(log.read_text(errors="replace").split())[-300:] or "it says nothing"


def check_can_mount() -> None:
    """Raises ConfigError where nothing can be mounted."""
    if os.geteuid() != 0:
        raise ConfigError("mounting a peer needs root")
    if not Path("/dev/fuse").exists():
        raise ConfigError("mounting a peer needs /dev/fuse")


def debian(folder: Path, packages: Sequence[str]) -> Path:
    """The root of a tree with the files of these packages of Debian, made once; nothing is installed.

    Raises:
        ConfigError: they cannot be had.
    """
    tree = folder / "root"
    if tree.exists():
        return tree
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise ConfigError(f"{packages[0]} comes from Debian's packages; {program} is not here")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run_tool(["apt-get", "download", "-q", *packages], Path(place))
        made = Path(place) / "root"
        for package in sorted(Path(place).glob("*.deb")):
            run_tool(["dpkg", "-x", package, made], Path(place))
        made.rename(tree)
    return tree


def fuse(folder: Path) -> dict[str, str]:
    """What the environment of a program that mounts holds: the way to `fusermount`, found or fetched.

    Raises:
        ConfigError: it cannot be had.
    """
    if shutil.which("fusermount") is not None:
        return {}
    tree = debian(folder / "fuse", _FUSE)
    link = tree / "bin" / "fusermount"
    if not link.exists():
        link.symlink_to("fusermount3")
    return {"PATH": f"{link.parent.absolute()}:{os.environ.get('PATH', os.defpath)}"}


def run_tool(command: Sequence[str | Path], folder: Path) -> None:
    """Runs a command to its end; raises ConfigError with its words if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} takes more than 300 s") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        raise ConfigError(f"{' '.join(map(str, command))}: {said}")
