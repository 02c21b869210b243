"""Ranks on the hosts of a lab, on virtual nodes of this machine, or on this machine as one host.

A lab's hosts are network namespaces on this machine (fireflyer/lab). An `Area` starts the ranks of
a benchmark, in new processes for every call. A `Place` is the context of one rank. The hosts'
network cards count the bytes, including headers and acknowledgements.
"""

import contextlib
import os
import secrets
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fireflyer import allocator
from fireflyer.bench.harness.ranks import Run, Session, Timing, on_ranks
from fireflyer.lab.hosts import Host, Lab

RAW_BYTES = 64 << 20  # size of the buffer at each end of a raw stream

T = TypeVar("T")


@dataclass
class Area:
    """Hosts on which ranks run.

    Attributes:
        lab: the lab; None: virtual nodes, or this host.
        folder: folder of the stores through which the ranks meet.
        nodes: number of virtual nodes if there is no lab; 0: this host.
        order: rank r is on host r // ranks_per_host if "contiguous", else on host r % hosts.
    """

    lab: Lab | None
    ranks_per_host: int
    folder: str
    nodes: int = 0
    order: str = "contiguous"
    _secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _times: int = 0

    @classmethod
    @contextlib.contextmanager
    def in_lab(
        cls, hosts: int, rate: str | None, ranks_per_host: int = 1, order: str = "contiguous"
    ) -> Iterator["Area"]:
        """Makes a lab for the duration of the context.

        Raises:
            LabError: no root, no iproute2, or an invalid rate.
        """
        with Lab(hosts, rate) as lab, tempfile.TemporaryDirectory() as folder:
            yield cls(lab, ranks_per_host, folder, order=order)

    @property
    def hosts(self) -> int:
        return len(self.lab.hosts) if self.lab is not None else max(self.nodes, 1)

    @property
    def ranks(self) -> int:
        return self.ranks_per_host * self.hosts

    def host_of(self, rank: int) -> int:
        """Returns the number of a rank's host."""
        return rank // self.ranks_per_host if self.order == "contiguous" else rank % self.hosts

    def run(self, body: Callable[["Place"], T]) -> T:
        """Runs `body` on every rank and returns rank 0's result.

        Raises:
            FireflyerError: a rank failed.
        """
        self._times += 1
        store = os.path.join(self.folder, f"store{self._times}")
        found: Any = on_ranks(self.ranks, partial(self._on_rank, store, body))
        return found  # type: ignore[no-any-return]

    def _on_rank(self, store: str, body: Callable[["Place"], T], rank: int) -> T:
        # `fireflyer run` configures malloc for its ranks in the same way. The peer's calls run in this
        # process, too, so malloc is the same for them.
        allocator.follow(os.environ)
        number = self.host_of(rank)
        with ExitStack() as stack:
            if self.lab is None:
                if self.nodes:
                    _enter_virtual(number)
                return body(Place(stack.enter_context(Session(store, rank, self.ranks))))
            host = _enter(self.lab, number, self._secret)
            session = stack.enter_context(Session(store, rank, self.ranks))
            second = next(r for r in range(self.ranks) if self.host_of(r) == 1)
            raw = stack.enter_context(RawStream(session, second, host))
            return body(Place(session, self.lab.hosts, raw))


def _enter(lab: Lab, number: int, secret: str) -> Host:
    """Moves this process, a rank, to a host of the lab."""
    host = lab.hosts[number]
    host.enter()
    os.environ.setdefault("FIREFLYER_SECRET", secret)
    os.environ["FIREFLYER_NODE"] = ""  # the namespace alone distinguishes the hosts
    os.environ["FIREFLYER_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    os.environ["MASTER_ADDR"] = lab.hosts[0].address
    return host


def _enter_virtual(number: int) -> None:
    os.environ["FIREFLYER_NODE"] = f"node{number}"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["FIREFLYER_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"


@dataclass
class Place:
    """Context of one rank. Without a lab, `raw` is None and all counts of sent bytes are 0."""

    session: Session
    hosts: list[Host] = field(default_factory=list)
    raw: "RawStream | None" = None

    @property
    def rank(self) -> int:
        return self.session.rank

    def line(self, size: int) -> float:
        """Returns the payload bytes per second of one raw stream; equal on all ranks."""
        run = self.raw_run(size)
        walls = [run(1).wall for _ in range(4)][1:]
        return size / statistics.median(walls) * 1e6

    def raw_run(self, size: int) -> Run:
        """Returns a run that makes one transfer, whatever number of calls is requested.

        One transfer lasts long enough to be timed alone.
        """
        assert self.raw is not None
        call = partial(self.raw.call, size)
        return lambda _: self.session.time(call, 1)

    def sent_by_a_host(self, act: Callable[[], T]) -> tuple[T, int]:
        """Returns the result of `act` and the bytes that the busiest host's card sent during it.

        The number is 0 except on rank 0. Collective.
        """

        def counters() -> list[int]:
            self.session.barrier()
            counts = [host.tx_bytes if self.rank == 0 else 0 for host in self.hosts]
            self.session.barrier()  # no rank continues before all counters are read
            return counts

        before = counters()
        done = act()
        after = counters()
        return done, max((a - b for a, b in zip(after, before, strict=True)), default=0)

    def counted(self, call: Callable[[], object]) -> tuple[Run, list[float]]:
        """Returns a run of `call`, and a list that receives the bytes per call of each run.

        The bytes are those of the busiest host's card; 0 except on rank 0.
        """
        sent: list[float] = []

        def run(calls: int) -> Timing:
            timing, most = self.sent_by_a_host(partial(self.session.time, call, calls))
            sent.append(most / calls)
            return timing

        return run, sent


class RawStream:
    """TCP connection from rank 0 to a rank of another host; all other ranks are idle.

    Args:
        second: the rank of the other host.
        host: host of this rank.
    """

    def __init__(self, session: Session, second: int, host: Host) -> None:
        self._sends = session.rank == 0
        self._socket: socket.socket | None = None
        if session.rank == second:
            with socket.create_server((host.address, 0)) as server:
                port = server.getsockname()[1]
                session.store.set("raw", f"{host.address} {port}")
                self._socket, _ = server.accept()
        elif self._sends:
            address, port = session.store.get("raw").decode().split()
            self._socket = socket.create_connection((address, int(port)))
        self._buffer = bytearray(RAW_BYTES if self._socket else 0)

    def __enter__(self) -> "RawStream":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def call(self, size: int) -> None:
        """Sends `size` bytes over the connection and one byte back."""
        if self._socket is None:
            return
        for at in range(0, size, RAW_BYTES):
            part = min(RAW_BYTES, size - at)
            if self._sends:
                self._socket.sendall(memoryview(self._buffer)[:part])
            else:
                self._receive(part)
        if self._sends:
            self._receive(1)
        else:
            self._socket.sendall(b"x")

    def _receive(self, size: int) -> None:
        assert self._socket is not None
        view = memoryview(self._buffer)[:size]
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the peer closed the raw stream")
            view = view[count:]
