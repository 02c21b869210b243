"""A server on an engine of pretended gangs, run as a program; its gangs "run on" as files when it dies.

`fake_server.py CONTROL_FD` has everything imported and forks servers on request. A task's arguments say
what its gang does:
  hold          runs until it is stopped or suspended
  finish        every rank returns 0 at once
  fail N        fails in its first N attempts, then finishes
  lose N        its supervisor dies in its first N attempts, then finishes
  say TEXT      writes TEXT to each rank's log, then holds
`HOME/engine/<task>.<attempt>` says which gangs were launched; a second launch of one would fail.
"""

import asyncio
import gc
import os
import select
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

# A server imports these when it needs them; no fork should pay for that.
import pydantic.v1  # noqa: F401
import uvicorn.lifespan.on
import uvicorn.protocols.http.h11_impl  # noqa: F401

from fireflyer.errors import FireflyerError
from fireflyer.hai.database import upgrade  # noqa: F401
from fireflyer.hai.database.connection import PostgreSQL
from fireflyer.hai.database.leader import LEASE_S
from fireflyer.hai.engines.inventory import Device, divide, parse_inventory
from fireflyer.hai.home import ServerFile, locate
from fireflyer.hai.model.engine import EngineEvent, Gang, GangEnded, Node, RankExited, RankStarted
from fireflyer.hai.server.listeners import Public
from fireflyer.hai.server.process import Options, serve


class FakeEngine:
    def __init__(self, nodes: int, files: Path, devices: tuple[Device, ...] = ()) -> None:
        shares = divide(devices, nodes)
        self._nodes = [
            Node(name=f"n{i}", gpus=len(own), gpu_type=own[0].kind if own else "")
            for i, own in enumerate(shares)
        ]
        self._files = files
        self._files.mkdir(exist_ok=True)
        self._queue: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._gangs: dict[str, Gang] = {}

    def nodes(self) -> list[Node]:
        return self._nodes

    async def prepare(self, gang: Gang) -> None:
        """Everything is ready."""

    async def launch(self, gang: Gang) -> None:
        with (self._files / f"{gang.task}.{gang.attempt}").open("x") as file:
            file.write(" ".join(gang.nodes))
        self._go(gang)

    async def recover(self, gang: Gang) -> None:
        if (self._files / f"{gang.task}.{gang.attempt}").exists():
            self._go(gang)
        else:
            self._end(gang, "lost", "its supervisors are gone")

    def _go(self, gang: Gang) -> None:
        self._gangs[gang.task] = gang
        what, *more = gang.args
        for rank in range(len(gang.nodes) * gang.ranks_per_node):
            if what == "say":
                with (gang.directory / f"{rank}.log").open("ab") as file:
                    file.write(more[0].encode())
            self._put(RankStarted, gang, rank=rank, node=self._node(gang, rank), pid=1000 + rank)
        broken = what in ("fail", "lose") and gang.attempt <= int(more[0])
        if what in ("hold", "say"):
            return
        if not broken:
            self._exit_all(gang, 0)
            self._end(gang, "finished", "")
        elif what == "fail":
            self._exit_all(gang, 1)
            self._end(gang, "failed", "rank 0 on n0 returned 1")
        else:
            self._end(gang, "lost", "the supervisor of n0 died")

    def _node(self, gang: Gang, rank: int) -> str:
        return gang.nodes[rank // gang.ranks_per_node]

    def _exit_all(self, gang: Gang, code: int, suspended: bool = False) -> None:
        for rank in range(len(gang.nodes) * gang.ranks_per_node):
            self._put(
                RankExited,
                gang,
                rank=rank,
                node=self._node(gang, rank),
                code=code,
                signal=None,
                suspended=suspended,
            )

    def _end(self, gang: Gang, outcome: str, reason: str) -> None:
        self._gangs.pop(gang.task, None)
        self._put(GangEnded, gang, outcome=outcome, reason=reason)

    def _put(self, kind: Callable[..., EngineEvent], gang: Gang, **fields: Any) -> None:
        event = kind(
            task=gang.task,
            attempt=gang.attempt,
            monotonic_ns=time.monotonic_ns(),
            wall=time.time(),
            **fields,
        )
        self._queue.put_nowait(event)

    async def suspend(self, task: str, attempt: int, grace_s: float) -> None:
        gang = self._gangs.get(task)
        if gang is not None and gang.attempt == attempt:
            self._exit_all(gang, 0, suspended=True)
            self._end(gang, "suspended", "as asked for")

    async def stop(self, task: str, attempt: int, grace_s: float) -> None:
        gang = self._gangs.get(task)
        if gang is not None and gang.attempt == attempt:
            self._exit_all(gang, 143)
            self._end(gang, "stopped", "as asked for")

    async def fail(self, task: str, attempt: int, reason: str) -> None:
        gang = self._gangs.get(task)
        if gang is not None and gang.attempt == attempt:
            self._end(gang, "failed", reason)

    async def drain(self, node: str, reason: str) -> None:
        """Noted; the server's own mark is what counts."""
        with (self._files / "drained").open("a") as file:
            file.write(f"{node}: {reason}\n")

    async def undrain(self, node: str) -> None:
        """Likewise."""

    async def release(self, task: str, directory: Path | None = None) -> None:
        with (self._files / "released").open("a") as file:
            file.write(f"{task}\n")

    async def events(self) -> AsyncIterator[EngineEvent]:
        while (event := await self._queue.get()) is not None:
            yield event

    async def close(self) -> None:
        self._queue.put_nowait(None)


def main(said: dict[str, Any], ready: int) -> None:
    """Serves with these fields of Options; `stand_by` is the file that is to be made instead of a call."""

    def tell(server: ServerFile) -> None:
        with open(ready, "wb") as pipe:
            pipe.write(msgspec.json.encode(server))

    def engine(options: Options) -> FakeEngine:
        return FakeEngine(options.nodes, options.home.path / "engine", options.devices)

    database = said.get("database")
    public = said.get("public")
    serve(
        Options(
            home=locate(Path(said["home"])),
            nodes=said.get("nodes", 2),
            devices=parse_inventory(said.get("gpus", "0")),
            port=said.get("port", 0),
            database=database and msgspec.convert(database, PostgreSQL),
            public=public and msgspec.convert(public, Public),
            lease_s=said.get("lease_s", LEASE_S),
            stand_by=lambda _leader: Path(said["stand_by"]).touch(),
        ),
        tell,
        engine,
    )


def fork_servers(control: socket.socket) -> None:
    """Forks a server for every message, options of `main`, with the descriptors of its ready pipe and its
    output; answers [pid, null] after the fork and [pid, exit code] after its end."""
    waiting: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([control.fileno(), *waiting], [], [])
        for pidfd in [fd for fd in readable if fd in waiting]:
            code = os.waitstatus_to_exitcode(os.waitpid(waiting[pidfd], 0)[1])
            control.send(msgspec.json.encode([waiting.pop(pidfd), code]))
            os.close(pidfd)
        if control.fileno() not in readable:
            continue
        data, (*descriptors,), _, _ = socket.recv_fds(control, 65536, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            for pidfd in waiting:
                os.close(pidfd)
            ready, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = 0
            try:
                main(msgspec.json.decode(data), ready)
            except FireflyerError as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                code = 1
            sys.stderr.flush()
            os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
        waiting[os.pidfd_open(pid)] = pid
        control.send(msgspec.json.encode([pid, None]))


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # no server searches what it was forked with
    fork_servers(socket.socket(fileno=int(sys.argv[1])))
