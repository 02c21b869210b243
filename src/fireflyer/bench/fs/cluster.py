"""File systems for the benchmark, started as users start them, by `fireflyer fs up`."""

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fireflyer.bench.harness.command_process import CommandProcess
from fireflyer.bench.harness.folder_scope import FolderScope
from fireflyer.errors import DeadlineExceeded, FireflyerError, PeerLost
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Client, Settings
from fireflyer.fs3.client.discovery import attach, find

READY_S = 60.0
END_S = 20.0
_FIREFLYER = (sys.executable, "-P", "-m", "fireflyer.cli")


class Service:
    """Process of `fireflyer fs up`, from the constructor to `close`.

    Args:
        prefix: command that runs the rest of the line elsewhere, for example on a host of a lab.
    """

    def __init__(
        self, log: Path, arguments: Sequence[str | Path], prefix: Sequence[str] = ()
    ) -> None:
        self._log = log
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [*prefix, *_FIREFLYER, "fs", "up", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def wait_until_ready(self) -> None:
        """Waits until the service prints that it is ready.

        Raises:
            PeerLost: the service ended; the message quotes its log.
            DeadlineExceeded: the service printed nothing for READY_S seconds.
        """
        out = self._process.stdout
        assert out is not None
        deadline = time.monotonic() + READY_S
        said = b""
        while b"\n" not in said:
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise DeadlineExceeded(f"`fireflyer fs up` is not ready: {self._words()}")
            more = os.read(out.fileno(), 4096)
            if not more:
                code = self._process.wait()
                raise PeerLost(f"`fireflyer fs up` ended with {code}: {self._words()}")
            said += more

    def most_resident(self) -> int:
        """Returns the peak resident memory of the process so far, in bytes."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise PeerLost(f"process {self._process.pid} has ended")

    def tell_to_end(self) -> None:
        """Sends SIGTERM; `close` must follow."""
        self._process.terminate()

    def close(self) -> None:
        """Ends the process: SIGTERM, then SIGKILL after END_S seconds."""
        self.tell_to_end()
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def kill(self) -> None:
        """Ends the process by SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def _words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-400:] or "it printed nothing"


class FileSystem(FolderScope):
    """File system in a folder that it creates and removes; a context manager.

    Attributes:
        where: path by which a client finds the file system: the cluster's configuration, or the
            folder.
    """

    def __init__(
        self, folder: Path, *, nodes: int = 0, replicas: int = 1, targets: int = 4
    ) -> None:
        """Describes the file system; `__enter__` starts it.

        Args:
            nodes: number of storage nodes. Each is a process that clients reach over TCP, and one
                more process is manager and metadata. 0: one process has all roles, and clients
                reach it over Unix sockets.
            targets: number of targets per node.
        """
        self.folder = self.inner = folder
        self._nodes, self._replicas, self._targets = nodes, replicas, targets
        self.services: list[Service] = []
        self.where = str(folder / "cluster.toml" if nodes else folder)

    def close(self) -> None:
        for service in self.services[1:]:  # all nodes at once, then the manager that they call
            service.tell_to_end()
        for service in reversed(self.services):
            service.close()
        self.services = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def attach(self, **settings: Any) -> Client:
        """Returns a client in this process; `settings` are fields of `Settings`."""
        return attach(self.where, settings=Settings(**settings))

    def worker(self, name: str, **settings: Any) -> "Worker":
        """Starts a client in a separate process."""
        return Worker(name, {"do": "attach", "where": self.where, "settings": settings})

    def start(self) -> None:
        if not self._nodes:
            embedded: list[str | Path] = ["--dir", self.folder, "--replicas", str(self._replicas)]
            embedded += ["--targets", str(self._targets)]
            self.services = [Service(self.folder / "up.log", embedded)]
        else:
            self._configure()
            roles = [("manager,meta", "n1")]
            roles += [("storage", f"n{number}") for number in range(1, self._nodes + 1)]
            for index, (role, name) in enumerate(roles):
                self.services.append(self.serve(index, role, name))
        for service in self.services:
            service.wait_until_ready()
        if self._replicas > 1:
            self._wait_until_whole()

    def _wait_until_whole(self) -> None:
        deadline = time.monotonic() + READY_S
        while any(chain.state != "whole" for chain in survey.health(find(self.where)).chains):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the chains of {self.where} did not become whole in time")
            time.sleep(0.05)

    def serve(self, index: int, role: str, name: str) -> Service:
        """Starts the process of one role."""
        log = self.folder / f"{role}-{name}.log"
        return Service(log, ["--config", self.where, "--role", role, "--name", name])

    def _configure(self) -> None:
        secret = self.folder / "secret"
        secret.write_text(os.urandom(32).hex())
        secret.chmod(0o600)
        text = f'manager = "{self.address(0)}:{self.free_port()}"\n'
        text += f'secret_file = "secret"\nreplicas = {self._replicas}\n'
        for number in range(1, self._nodes + 1):
            text += f'\n[nodes.n{number}]\naddress = "{self.address(number)}:0"\n'
            text += f"targets = {self._targets}\n"
        Path(self.where).write_text(text)

    def address(self, index: int) -> str:
        """Returns the address of the manager (0) or of a node."""
        return "127.0.0.1"

    def free_port(self) -> int:
        """Returns a free port at the manager's address."""
        with socket.socket() as probe:
            probe.bind((self.address(0), 0))
            return int(probe.getsockname()[1])


class Worker(CommandProcess):
    """Process that acts as many clients of one file system, ours or a mounted one (`worker.py`).

    Raises:
        PeerLost: the process cannot reach the file system.
    """

    def __init__(self, name: str, first: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-P", "-m", "fireflyer.bench.fs.worker"]
        super().__init__(name, command, os.environ)
        try:
            self.ask(first, READY_S)
        except FireflyerError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(workers: Sequence[Worker], commands: Sequence[dict[str, Any]]) -> float:
    """Sends all workers their commands at once.

    Returns:
        Seconds from the first start to the last end.
    """
    for worker, command in zip(workers, commands, strict=True):
        worker.send(command)
    answers = [worker.receive(command) for worker, command in zip(workers, commands, strict=True)]
    ended: float = max(answer["ended"] for answer in answers)
    began: float = min(answer["began"] for answer in answers)
    return ended - began
