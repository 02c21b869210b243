"""A cluster of real processes in a lab: a manager and a standby on host 0, a storage node on each other.

Clients run on host 0 too. One thread.
"""

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from tests.fs3.soak.contents import Manifest
from tests.fs3.soak.verify import Verdict

from fireflyer.fs3.client.discovery import find
from fireflyer.fs3.config import FILE, load
from fireflyer.fs3.survey import Health, health
from fireflyer.lab import Lab

HOSTS = 5
LIMIT_S = 360.0
MANAGERS = ("manager-a", "manager-b")

Versions = dict[int, int]
"""Version of each chain."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster is made."""

    failover_s: float = 0.8
    replicas: int = 2
    targets: int = 2
    chunk_kib: int = 256
    scrub_s: float = 7 * 24 * 3600.0
    recovery_wait_s: float = 60.0


class Part:
    """A process of the cluster, which may be started again and again."""

    def __init__(self, lab: Lab, host: int, name: str, words: list[str], folder: Path) -> None:
        self.name, self.host = name, host
        self._lab, self._words = lab, words
        self._out, self._log = folder / f"{name}.out", folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        assert not self.running
        command = [sys.executable, "-P", "-m", "fireflyer.cli", "fs", "up", *self._words]
        with self._out.open("ab") as out, self._log.open("ab") as log:
            self.process = self._lab.popen(
                self.host, command, stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process
        self.process.wait()

    @property
    def said(self) -> str:
        """What it and its predecessors said on stdout."""
        return self._out.read_text() if self._out.exists() else ""

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


class Cluster:
    """The processes, by name, and what the manager says."""

    def __init__(self, lab: Lab, folder: Path, shape: Shape) -> None:
        self.lab, self.folder, self.shape = lab, folder, shape
        self.config = _write_config(lab, folder, shape)
        manager = ["--config", str(self.config), "--role", "manager,meta", "--standby"]
        self.parts = {name: Part(lab, 0, name, manager, folder) for name in MANAGERS}
        for n in range(1, HOSTS):
            words = ["--config", str(self.config), "--role", "storage", "--name", f"n{n}"]
            self.parts[f"n{n}"] = Part(lab, n, f"n{n}", words, folder)
        self._clients: list[tuple[subprocess.Popen[bytes], Path]] = []

    @property
    def nodes(self) -> list[str]:
        return [name for name in self.parts if name not in MANAGERS]

    def note(self, what: str) -> None:
        """A line of the log `faults.log`, with the time that the processes' logs have."""
        now = datetime.datetime.now().isoformat(" ", "milliseconds")
        with (self.folder / "faults.log").open("a") as log:
            log.write(f"{now} {what}\n")

    def start(self) -> None:
        """Returns when files can be used."""
        for part in self.parts.values():
            part.start()
        end = time.monotonic() + LIMIT_S
        while not any("ready" in self.parts[name].said for name in MANAGERS):
            assert time.monotonic() < end, {n: p.log[-2000:] for n, p in self.parts.items()}
            time.sleep(0.05)

    def health(self) -> Health:
        """Asked of the manager; waits for one."""
        return self.lab.hosts[0].call(lambda: health(find(str(self.config))))

    def sole_holders(self, state: Health) -> set[str]:
        """Nodes of which one's death would leave a chain without an up-to-date target."""
        sole: set[str] = set()
        for chain in state.chains:
            serving = [target.node for target in chain.targets if target.state == "serving"]
            if len(serving) <= 1:
                sole |= set(serving or [target.node for target in chain.targets])
        return sole

    def wait_until_whole(self, limit_s: float) -> float:
        """Seconds until every target serves.

        Raises:
            AssertionError: some do not; says which.
        """
        return self._wait(limit_s, lambda state, _: degraded(state))

    def wait_until_settled(self, limit_s: float) -> Versions:
        """Returns the chains' versions when all serve, and nothing done before this call can change that.

        The manager misses a node only when its lease has ended, so chains seem whole for a moment though
        their nodes were killed. Therefore each node must be heard anew, and all be the same one failover
        later.

        Raises:
            AssertionError: that does not come; says why.
        """
        since, versions = 0.0, Versions()

        def why(state: Health, waited: float) -> list[str]:
            nonlocal since, versions
            if found := unsettled(state, waited):
                versions = {}
            elif versions != (now := versions_of(state)):
                since, versions = waited, now
            elif waited - since >= self.shape.failover_s:
                return []
            return found or ["it has just become whole"]

        self._wait(limit_s, why)
        return versions

    def _wait(self, limit_s: float, why: Callable[[Health, float], list[str]]) -> float:
        """Seconds until nothing speaks against it; `why` also gets the seconds waited so far."""
        begun = time.monotonic()
        while True:
            asked = time.monotonic()
            reasons = why(self.health(), asked - begun)
            if not reasons:
                return time.monotonic() - begun
            assert asked - begun < limit_s, f"after {limit_s:.0f} s: {reasons}"
            time.sleep(0.1)

    def alone(self, node: str, after: Versions, until: Versions) -> bool:
        """Whether a target of that node alone served its chain, in a version between those two."""
        logs = [self.parts[name].log for name in MANAGERS]
        sole = sole_servers("\n".join(logs), after, until)
        members = [target for chain in self.health().chains for target in chain.targets]
        return any(target.target in sole for target in members if target.node == node)

    def mount(self, host: int, directory: Path, *options: str) -> None:
        """Mounts the file system by a process of a host; this process and its children see the directory."""
        directory.mkdir()
        here = ["nsenter", f"--mount=/proc/{os.getpid()}/ns/mnt", "--"]
        words = ["fs", "mount", str(directory), "--foreground", "--dir", str(self.config), *options]
        with (self.folder / f"{directory.name}.log").open("ab") as log:
            process = self.lab.popen(
                *(host, [*here, sys.executable, "-P", "-m", "fireflyer.cli", *words]),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert process.stdout
        with process.stdout as out:
            assert b"is mounted" in out.readline(), (self.folder / log.name).read_text()

    # Clients

    def _module(self, name: str, *words: str | Path) -> list[str]:
        return [sys.executable, "-m", f"tests.fs3.soak.{name}", *map(str, words)]

    def load(self, number: int, seed: int, threads: int) -> None:
        """Starts a client."""
        out = self.folder / f"client-{number}.manifest"
        words = (self.config, str(number), str(seed), str(threads), out)
        with (self.folder / f"client-{number}.log").open("ab") as log:
            process = self.lab.popen(
                *(0, self._module("load", *words)),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        self._clients.append((process, out))

    def stop_load(self) -> None:
        """Asks the clients to end."""
        for process, _ in self._clients:
            assert process.stdin
            process.stdin.close()

    def end_load(self, limit_s: float) -> list[Path]:
        """The manifests of the clients."""
        self.stop_load()
        end = time.monotonic() + limit_s
        for n, (process, _) in enumerate(self._clients):
            code = process.wait(max(1.0, end - time.monotonic()))
            log = (self.folder / f"client-{n}.log").read_text()
            assert code == 0, f"client {n} ended with {code}: {log[-3000:]}"
        return [out for _, out in self._clients]

    def verify(self, manifests: list[Path]) -> Verdict:
        """Without manifests: returns when nothing is damaged any more."""
        chunk = str(self.shape.chunk_kib << 10)
        done = self.lab.run(
            0, self._module("verify", self.config, chunk, *manifests), timeout_s=10 * LIMIT_S
        )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        return msgspec.json.decode(done.stdout, type=Verdict)


def degraded(state: Health) -> list[str]:
    """Chains that are not whole."""
    return [
        f"chain {c.chain} version {c.version} is {c.state}: {[(t.node, t.state) for t in c.targets]}"
        for c in state.chains
        if c.state != "whole"
    ]


def unsettled(state: Health, seconds: float) -> list[str]:
    """Nodes not heard in the last `seconds`, and chains that are not whole."""
    silent = [
        f"{node.name} was not heard"
        for node in state.nodes
        if node.heard_s is None or node.heard_s >= seconds
    ]
    return silent + degraded(state)


def versions_of(state: Health) -> Versions:
    return {chain.chain: chain.version for chain in state.chains}


def sole_servers(log: str, after: Versions, until: Versions) -> set[int]:
    """Targets that alone served their chains in a version between those two, by a manager's log."""
    sole: set[int] = set()
    for number, version, members in re.findall(r"chain (\d+) version (\d+): (.*)", log):
        serving = re.findall(r"(\d+) SERVING", members)
        chain = int(number)
        if after[chain] < int(version) <= until[chain] and len(serving) == 1:
            sole.add(int(serving[0]))
    return sole


def read_manifest(path: Path) -> Manifest:
    return msgspec.msgpack.decode(path.read_bytes(), type=Manifest)


def _write_config(lab: Lab, folder: Path, shape: Shape) -> Path:
    secret = folder / "secret"
    secret.write_text("the secret of a cluster that is shot at")
    secret.chmod(0o600)
    nodes = "".join(
        f'\n[nodes.n{n}]\naddress = "{lab.hosts[n].address}:4501"\ntargets = {shape.targets}\n'
        f"workers = 4\nbuffer_mib = 64\nscrub_days = {shape.scrub_s / 86_400:.9f}\n"
        for n in range(1, HOSTS)
    )
    path = folder / FILE
    path.write_text(
        f'manager = "{lab.hosts[0].address}:4500"\nsecret_file = "secret"\n'
        f"replicas = {shape.replicas}\nchunk_kib = {shape.chunk_kib}\n"
        f"failover_s = {shape.failover_s}\nrecovery_wait_s = {shape.recovery_wait_s}\n{nodes}"
    )
    load(path)
    return path


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """A file system of that size on the folder, which needs root."""
    folder.mkdir(mode=0o700)
    option = f"size={mebibytes}m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
