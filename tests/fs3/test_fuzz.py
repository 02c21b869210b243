"""Damaged frames on every port: the service stays up, says nothing wrong, and all files keep their bytes.

FIREFLYER_FUZZ_FRAMES frames a port (default 100,000 with --full, else 10,000).
"""

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import draws
from tests.fs3.fuzzing import (
    ANSWER_S,
    Control,
    Dice,
    Frames,
    after_proof,
    before_proof,
    proved,
    settled,
)

from fireflyer.fs3 import survey
from fireflyer.fs3.client.discovery import attach, find
from fireflyer.rpc.address import Address
from fireflyer.rpc.proof import Secret

FRAMES = int(os.environ.get("FIREFLYER_FUZZ_FRAMES") or draws.cases(100_000))
SEED = draws.seed()
BEFORE = 50
"""Of so many frames one comes before the handshake."""
SIZES = (0, 1, 5000, 1 << 20, (3 << 20) + 7)
MOST_MIB = 600


pytestmark = pytest.mark.deadline(480 + FRAMES / 500)


class Victim:
    """A file system in a process of its own, and the sums of what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        command = [sys.executable, "-P", "-m", "fireflyer.cli", "fs", "up", "--dir", str(folder)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--replicas", "2", "--targets", "2"], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout
        self.ready = self.process.stdout.readline().decode()
        assert "ready" in self.ready, self.log.read_text()
        self.secret = Secret.from_file(folder / "secret")
        self.sums: dict[str, str] = {}
        rng = random.Random(SEED)
        with attach(str(folder)) as fs:
            fs.mkdir("/fuzz")
            fs.chmod("/fuzz", 0o777)
            for size in SIZES:
                data = rng.randbytes(size)
                with fs.open(f"/{size}", "wb", permissions=0o600) as file:
                    file.write(data)
                self.sums[f"/{size}"] = hashlib.sha256(data).hexdigest()

    def check(self) -> None:
        """It runs, no handler failed, and every byte is there, on all replicas."""
        assert self.process.poll() is None, self.log.read_text()[-5000:]
        said = self.log.read_text()
        assert "Traceback" not in said, said[said.index("Traceback") - 500 :][:5000]
        settled(self.whole, "the chains do not become whole again")
        with attach(str(self.folder)) as fs:
            for name, expected in self.sums.items():
                with fs.open(name) as file:
                    assert hashlib.sha256(file.readall() or b"").hexdigest() == expected, name
            with fs.open("/fuzz/after", "wb") as file:
                file.write(bytes(100_000))
            fs.unlink("/fuzz/after")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < MOST_MIB << 10

    def whole(self) -> bool:
        chains = survey.health(find(str(self.folder))).chains[:2]
        return all(chain.state == "whole" for chain in chains)

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    made = Victim(tmp_path_factory.mktemp("fuzz") / "fs")
    yield made
    made.end()


def test_the_port_of_the_manager_and_the_metadata(victim: Victim) -> None:
    dice = Dice(SEED)
    address = f"unix:{victim.folder}/manager.sock"
    before_proof(address, dice, FRAMES // BEFORE)
    after_proof(lambda: proved(address, victim.secret), Control(dice), FRAMES - FRAMES // BEFORE)
    victim.check()


def test_the_port_of_the_storage(victim: Victim) -> None:
    dice = Dice(SEED + 1)
    address = f"unix:{victim.folder}/s1.sock"
    before_proof(address, dice, FRAMES // BEFORE)
    found = survey.health(find(str(victim.folder)))
    chains = [(chain.chain, chain.version) for chain in found.chains[:2]]
    targets = [its.target for chain in found.chains[:2] for its in chain.targets]
    frames = Frames(dice, chains, targets)
    after_proof(
        lambda: proved(address, victim.secret, dice.choice((1, 4))),
        frames,
        FRAMES - FRAMES // BEFORE,
    )
    victim.check()


def test_the_port_of_the_metrics(victim: Victim) -> None:
    """A connection a request: a twentieth of the others' number."""
    dice = Dice(SEED + 2)
    good = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    url = victim.ready.split("http://")[1].split("/")[0]
    for _ in range(FRAMES // 20):
        request = dice.choice(
            (
                dice.damaged(good, 6),
                dice.damaged(b"GET /healthz HTTP/1.1\r\n\r\n"),
                dice.randbytes(dice.randrange(200)) + b"\r\n\r\n",
                good[: dice.randrange(len(good))],
                b"GET /" + b"a" * dice.randrange(1 << 14),
            )
        )
        with Address.parse(url).connect(ANSWER_S) as line:
            try:
                line.sendall(request)
                line.shutdown(socket.SHUT_WR)
                answer = line.recv(4096)
            except ConnectionError:
                continue
            assert answer[:9] in (b"", b"HTTP/1.1 "), answer
    victim.check()
