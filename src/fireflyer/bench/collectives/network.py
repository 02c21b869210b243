"""Allreduce between the hosts of a lab: bytes on the wire, and time against the line's own rate.

The line rate is the payload rate of one raw TCP stream of the tensor's size between two hosts, in
the same round. An allreduce of S bytes among H hosts must send 2S(H-1)/H from each host, so no
float32 wire is faster than that over the line rate. The hosts' network cards count the bytes,
headers and acknowledgements included.
"""

import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.options import WIRES, size_text
from fireflyer.bench.harness.ranks import Run, Session, Timing, interleave, on_ranks
from fireflyer.bench.harness.report import Row
from fireflyer.lab.hosts import Host, Lab

RAW, OURS, GLOO = "raw TCP", "hfreduce", "gloo"


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        rate: speed of each cable, in the lab's notation.
        sizes: bytes of a float32 tensor.
        wires: names from `options.WIRES`, measured beside the float32 wire.
        orders: names from `options.ORDERS`. Rank r is on host r // ranks_per_host if "contiguous",
            else on host r % hosts.
    """

    hosts: int
    ranks_per_host: int
    rate: str
    sizes: tuple[int, ...]
    wires: tuple[str, ...]
    orders: tuple[str, ...]
    rounds: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int, order: str) -> int:
        return rank // self.ranks_per_host if order == "contiguous" else rank % self.hosts


@dataclass
class Measured:
    """Results of one size and order, by candidate: one value per round.

    Attributes:
        sent: bytes per call of the host that sends most.
    """

    timings: dict[str, list[Timing]]
    sent: dict[str, list[float]]


def run(spec: Spec) -> list[Row]:
    """Measures every order in a lab of its own.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed.
    """
    rows = []
    secret = secrets.token_hex(16)
    for order in spec.orders:
        with Lab(spec.hosts, spec.rate) as lab, tempfile.TemporaryDirectory() as folder:
            body = partial(_rank, spec, order, lab, secret, os.path.join(folder, "store"))
            results: dict[int, Measured] = on_ranks(spec.ranks, body)
        for size, measured in results.items():
            rows += _rows(spec, order, size, measured)
    return rows


def enter(lab: Lab, index: int, secret: str) -> Host:
    """Moves this process, a rank, to a host of the lab."""
    host = lab.hosts[index]
    host.enter()
    os.environ.setdefault("FIREFLYER_SECRET", secret)
    os.environ["FIREFLYER_NODE"] = ""  # the namespace alone tells the hosts apart
    os.environ["FIREFLYER_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    os.environ["MASTER_ADDR"] = lab.hosts[0].address
    return host


def _rank(
    spec: Spec, order: str, lab: Lab, secret: str, store: str, rank: int
) -> dict[int, Measured]:
    host = enter(lab, spec.host_of(rank, order), secret)
    second = next(r for r in range(spec.ranks) if spec.host_of(r, order) == 1)
    with (
        Session(store, rank, spec.ranks) as session,
        RawStream(session, second, host, max(spec.sizes)) as raw,
    ):
        return {size: _measure(session, spec, lab.hosts, raw, size) for size in spec.sizes}


def _measure(
    session: Session, spec: Spec, hosts: list[Host], raw: "RawStream", size: int
) -> Measured:
    tensor = hfreduce.empty(size // 4, dtype=torch.float32).zero_()
    plain = torch.zeros(size // 4)
    allreduce: Any = hfreduce.allreduce
    calls: dict[str, Callable[[], object]] = {
        RAW: partial(raw.call, size),
        OURS: partial(dist.all_reduce, tensor),
        GLOO: partial(dist.all_reduce, plain, dist.ReduceOp.SUM, session.gloo),
    }
    for wire in spec.wires:
        calls[wire] = partial(allreduce, tensor, wire=wire)
    sent: dict[str, list[float]] = {name: [] for name in calls}
    runs = {name: _counted(session, hosts, call, sent[name]) for name, call in calls.items()}
    timings = interleave(runs, spec.rounds, least=1)
    return Measured(timings, {name: list_[-spec.rounds :] for name, list_ in sent.items()})


def _counted(
    session: Session, hosts: list[Host], call: Callable[[], object], sent: list[float]
) -> Run:
    """Returns a run that also appends the bytes per call that the busiest host's card sent.

    The number is 0 except on rank 0.
    """

    def run(calls: int) -> Timing:
        timing, most = sent_by_a_host(session, hosts, partial(session.time, call, calls))
        sent.append(most / calls)
        return timing

    return run


def sent_by_a_host(
    session: Session, hosts: list[Host], act: Callable[[], Timing]
) -> tuple[Timing, int]:
    """Returns the result of `act` and the bytes that the busiest host's card sent meanwhile.

    The number is 0 except on rank 0.
    """

    def counters() -> list[int]:
        session.barrier()
        return [host.tx_bytes for host in hosts] if session.rank == 0 else [0] * len(hosts)

    before = counters()
    timing = act()
    after = counters()
    return timing, max(a - b for a, b in zip(after, before, strict=True))


class RawStream:
    """TCP connection from rank 0 to a rank of another host; all other ranks are idle.

    Args:
        second: the rank of the other host.
        host: host of this rank.
        most: maximum bytes of a call.
    """

    def __init__(self, session: Session, second: int, host: Host, most: int) -> None:
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
        self._buffer = bytearray(most if self._socket else 0)

    def __enter__(self) -> "RawStream":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def call(self, size: int) -> None:
        """Sends `size` bytes over the line and one byte back."""
        if self._socket is None:
            return
        if self._sends:
            self._socket.sendall(memoryview(self._buffer)[:size])
            self._receive(1)
        else:
            self._receive(size)
            self._socket.sendall(b"x")

    def _receive(self, size: int) -> None:
        assert self._socket is not None
        view = memoryview(self._buffer)[:size]
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the peer closed the raw stream")
            view = view[count:]


def _rows(spec: Spec, order: str, size: int, measured: Measured) -> list[Row]:
    h = spec.hosts
    bound = 2 * size * (h - 1) / h
    case = f"{h}x{spec.ranks_per_host} {order}, {size_text(size)}"
    raw = [timing.wall / 1e3 for timing in measured.timings[RAW]]
    at_line_rate = [ms * bound / size for ms in raw]
    ours = [timing.wall / 1e3 for timing in measured.timings[OURS]]
    rows = []
    for name in (OURS, *spec.wires):
        share = WIRES[name] / 4 if name != OURS else 1.0
        what = "float32 wire" if name == OURS else f"{name} wire"
        bytes_goal = goals.NIC_BYTES if name == OURS else None
        bounds = [bound * share]
        rows.append(
            Row.of_times(
                f"{case}, {what}, sent by a host", "B", measured.sent[name],
                "2S(H-1)/H" if name == OURS else f"2S(H-1)/H x {share:g}", bounds, bounds, bytes_goal,
            )
        )  # fmt: skip
        walls = [timing.wall / 1e3 for timing in measured.timings[name]]
        limits = [ms * share for ms in at_line_rate]
        time_goal = goals.LINE_RATE if name == OURS and _is_asked(size) else None
        rows.append(
            Row.of_times(
                f"{case}, {what}, wall", "ms", walls, "line rate", limits, limits, time_goal
            )
        )
        if name != OURS:
            rows.append(
                Row.of_times(
                    f"{case}, {what}, wall", "ms", walls, "float32 wire", ours, (),
                    goals.wire(name, size),
                )
            )  # fmt: skip
    theirs = [timing.wall / 1e3 for timing in measured.timings[GLOO]]
    goal = goals.flat_gloo(h, spec.ranks_per_host, order, size)
    rows.append(Row.of_times(f"{case}, float32 wire, wall", "ms", ours, GLOO, theirs, (), goal))
    cpus = [timing.cpu / 1e3 for timing in measured.timings[OURS]]
    their_cpus = [timing.cpu / 1e3 for timing in measured.timings[GLOO]]
    rows.append(Row.of_times(f"{case}, float32 wire, CPU", "ms", cpus, GLOO, their_cpus))
    return rows


def _is_asked(size: int) -> bool:
    return size in (16 << 20, 64 << 20)
