"""Peers of the record benchmark: their environments, and one worker process each."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from fireflyer.bench.harness.command_process import CommandProcess
from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost

WORKER = Path(__file__).parents[1] / "peers" / "worker.py"
REQUIRES = {
    "array_record": ("array_record==0.8.6", "numpy"),
    "lmdb": ("lmdb==3.0.0", "numpy"),
    "mosaicml-streaming": ("mosaicml-streaming==0.13.0", "torch==2.13.0"),
    "pylance": ("pylance==14.0.2", "numpy"),
    "webdataset": ("webdataset==1.0.2", "numpy"),
}
"""Packages to install in each environment."""


def python_of(folder: Path, peer: str) -> Path:
    return folder / peer / "bin" / "python"


def install(folder: Path, say: Callable[[str], None]) -> None:
    """Creates a separate environment for each peer, because their version pins conflict.

    Existing environments remain.

    Raises:
        ConfigError: an environment cannot be created; the other environments are created.
    """
    failed = []
    for peer, packages in REQUIRES.items():
        target = folder / peer
        if python_of(folder, peer).exists():
            continue
        say(f"installing {peer} into {target}")
        commands = (
            [sys.executable, "-m", "venv", str(target)],
            [str(python_of(folder, peer)), "-m", "pip", "install", "-q", *packages],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                failed.append(f"{peer}: {done.stderr.strip().splitlines()[-1:]}")
                shutil.rmtree(target, ignore_errors=True)
                break
    if failed:
        raise ConfigError(f"--install-peers: {'; '.join(failed)}")


class Peer(CommandProcess):
    """Worker process of one peer, as a context manager.

    Attributes:
        name, version: for example "lmdb" and "3.0.0".
        views: True if the peer can return views of its map.
        verifies: True if the peer compares checksums of the data that it reads.
        sequential: True if the peer reads only in order.
    """

    def __init__(self, python: Path, name: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONWARNINGS", None)
        super().__init__(name, [python, "-P", WORKER, name], environment)

    def __enter__(self) -> Self:
        try:
            found = self.ask({"do": "hello"})
        except BaseException:
            self.close()
            raise
        self.version = str(found["version"])
        self.views, self.verifies = bool(found["views"]), bool(found["verifies"])
        self.sequential = bool(found["sequential"])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, raw: Path, work: Path) -> None:
        """Writes the samples of raw.bin in the peer's format, once."""
        self.ask({"do": "prepare", "raw": str(raw), "work": str(work)})

    def round(self, work: Path, indices: Path, batch: int, *, cold: bool, views: bool) -> float:
        """Reads the samples of `indices` (an `.npy` file) in batches and returns the seconds."""
        command = {
            "do": "round", "work": str(work), "indices": str(indices), "batch": batch, "cold": cold,
            "views": views,
        }  # fmt: skip
        return float(self.ask(command)["seconds"])


@contextmanager
def started(
    folder: Path | None, names: Sequence[str]
) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """Yields the installed peers and, for each other peer, the reason why it is missing."""
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name in names:
            if folder is None or not python_of(folder, name).exists():
                missing[name] = f"{name} is not installed"
                continue
            try:
                peers.append(stack.enter_context(Peer(python_of(folder, name).absolute(), name)))
            except (PeerLost, DeadlineExceeded, OSError) as error:
                missing[name] = str(error)
        yield peers, missing
