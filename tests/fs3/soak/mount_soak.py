"""A mount under checkers like fsx while every role is killed.

`python -m tests.fs3.soak.mount_soak --seconds 300`; see docs/benchmarks/fs3-soak.md. Ends with 1 if a byte
differs or a program got an error; prints a summary as JSON.
"""

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.fs3.soak import faults
from tests.fs3.soak.cluster import LIMIT_S, Cluster, Shape

from fireflyer.fs3.client.discovery import attach
from fireflyer.fs3.mount import program
from fireflyer.lab import Lab

EVERY_S = 5.0
CHECKERS = 4


class Summary(msgspec.Struct):
    """What was killed, what the checkers did, and what differed or failed."""

    seconds: float
    seed: int
    kills: dict[str, int]
    operations: dict[str, int]
    problems: list[str]


@contextlib.contextmanager
def mounted(cluster: Cluster, host: int, directory: Path, *options: str) -> Iterator[Path]:
    """Mounts the cluster's file system at a directory during the block."""
    cluster.mount(host, directory, *options)
    try:
        yield directory
    finally:
        program.unmount(str(directory), lazy=True)


def soak(seconds: float, seed: int, folder: Path, checkers: int, every_s: float) -> Summary:
    """One run, in an empty folder, which it makes."""
    folder.mkdir(parents=True, exist_ok=True)
    with Lab(5) as lab:
        cluster = Cluster(lab, folder, Shape())
        cluster.start()
        with mounted(cluster, 0, folder / "mount") as place:
            running = [_checker(place / f"file-{n}", seed * 1000 + n) for n in range(checkers)]
            try:
                _, counts = faults.kills(cluster, seed, seconds, every_s)
                summary = Summary(seconds, seed, dict(counts), {}, [])
                digests = [_end(process, summary) for process in running]
            finally:
                for process in running:
                    process.kill()
                    process.communicate()
        lab.hosts[0].call(lambda: _compare(cluster, digests, summary))
    return summary


def _checker(path: Path, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fs3.soak.mounted", str(path), str(seed)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def _end(process: subprocess.Popen[bytes], summary: Summary) -> str:
    """Ends a checker; returns the digest of what its file must hold."""
    out, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        summary.problems.append(errors.decode()[-2000:])
        return ""
    counts, digest = json.loads(out)
    summary.operations = dict(Counter(summary.operations) + Counter(counts))
    return str(digest)


def _compare(cluster: Cluster, digests: list[str], summary: Summary) -> None:
    """Reads the files by a client that never saw the mount."""
    with attach(str(cluster.config)) as client:
        for number, wanted in enumerate(digests):
            with client.open(f"/file-{number}") as file:
                seen = hashlib.sha256(file.read()).hexdigest()
            if wanted and seen != wanted:
                summary.problems.append(f"file-{number} differs for another client")


def main() -> int:
    parser = argparse.ArgumentParser(prog="mount_soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fs3-soak-") as folder:
        summary = soak(options.seconds, options.seed, Path(folder), CHECKERS, EVERY_S)
    print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    print(f"soak mount: {'FAILED' if summary.problems else 'ok'}")
    return 1 if summary.problems else 0


if __name__ == "__main__":
    sys.exit(main())
