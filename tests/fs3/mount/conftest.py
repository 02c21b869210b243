"""A cluster in this process, and mounts of it by processes of their own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fs3.client.conftest import Cluster, calm, cluster, fs
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError
from fireflyer.fs3.mount import program

__all__ = ["calm", "cluster", "fs"]


class Mounted:
    """Directory that a process of its own has mounted."""

    def __init__(self, cluster: Cluster, directory: Path, *options: str) -> None:
        self.directory = directory
        with contextlib.suppress(FileExistsError):  # also a mount whose process died
            os.mkdir(directory)
        command = [sys.executable, "-m", "fireflyer.cli", "fs", "mount", str(directory)]
        command += ["--foreground", "--dir", cluster.address, *options]
        env = {**os.environ, "FIREFLYER_FS_SECRET_FILE": str(cluster.secret_file)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        assert "is mounted" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Waits for the end of the process; returns its exit code."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(LIMIT_S)

    def close(self) -> int:
        """Unmounts, also what somebody still uses; returns the process's exit code."""
        if program.mounted_at(str(self.directory)) is not None:
            program.unmount(str(self.directory), lazy=True)
        return self.wait()


def why_not(directory: Path) -> str:
    """Returns why nothing can be mounted here; empty if it can."""
    try:
        program.check(str(directory))
    except ConfigError as error:
        return str(error)
    return "" if os.getuid() == 0 else "a mount for all users needs root"


@contextlib.contextmanager
def mount(cluster: Cluster, folders: pytest.TempPathFactory, *options: str) -> Iterator[Mounted]:
    """Mounts until the end of the block; skips the test where nothing can be mounted."""
    if reason := why_not(folders.mktemp("none")):
        pytest.skip(reason)
    one = Mounted(cluster, folders.mktemp("mount"), *options)
    yield one
    one.close()


@pytest.fixture(scope="session")
def mounted(calm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mount(calm, tmp_path_factory) as one:
        yield one


@pytest.fixture
def place(mounted: Mounted) -> Iterator[Path]:
    """The mount, empty. The kernel's names of it are current, because it is emptied through it."""
    yield mounted.directory
    for one in mounted.directory.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()
