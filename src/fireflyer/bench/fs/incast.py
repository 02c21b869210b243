"""Incast as in the paper: many servers answer one client at once over a shaped cable.

A switch port has a small queue. If all servers answer at once, the switch drops the packets that do
not fit. TCP retransmits these packets, often after a timeout. Request-to-send limits the number of
servers that send at a time; the case runs with and without it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from fireflyer.bench.fs.cluster import FileSystem, Service, Worker, together
from fireflyer.bench.fs.context import Setting, remote
from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row
from fireflyer.errors import LabError
from fireflyer.fs3.client import Settings
from fireflyer.lab import Lab
from fireflyer.lab.hosts import parse_rate

RATE = "1gbit"
QUEUE_MS = 1.0
_CHUNK = 1 << 20
_DEFAULT = Settings().senders
SENDERS = tuple(sorted({1, 2, 4, 8, _DEFAULT}))
_OFF = 1000
"""Number of senders above any number of servers, so that request-to-send has no effect."""
_WITHOUT = "all at once"
_MB = 1e6


class Measured(NamedTuple):
    """Figures of one round."""

    rate: float
    """Throughput in MB/s."""
    packets: float
    """Packets that reached the switch's port to the client, per 1,000 packets that the port
    forwarded."""
    segments: float
    """Segments that the servers sent, per 1,000 segments that were not retransmissions."""


class LabFileSystem(FileSystem):
    """File system on a lab's hosts: manager and metadata on the first, a node on each other
    host."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, nodes=len(lab.hosts) - 1, targets=1)
        self._lab = lab

    def serve(self, index: int, role: str, name: str) -> Service:
        log = self.folder / f"{role}-{name}.log"
        arguments = ["--config", self.where, "--role", role, "--name", name]
        return Service(log, arguments, self._lab.hosts[index].prefix)

    def address(self, index: int) -> str:
        return self._lab.hosts[index].address

    def free_port(self) -> int:
        return self._lab.hosts[0].free_port()

    def client(self, name: str, senders: int) -> Worker:
        """Starts a client on the first host; at most `senders` servers send to it at a time."""
        settings = {"senders": senders} | remote()
        first = {"do": "attach", "where": self.where, "settings": settings}
        return Worker(name, first, self._lab.hosts[0].prefix)


def incast(setting: Setting) -> list[Row]:
    """Measures simultaneous reads of a chunk from each server, by the number of allowed senders."""
    servers = setting.sizes.servers
    case = f"{servers} servers, one client, {RATE}"
    setting.say(case)
    try:
        found = _measured(setting, servers)
    except LabError as error:
        return [_missing(case, str(error))]
    off = found[_OFF]
    rows = []
    for senders in SENDERS:
        on = found[senders]
        rates = [[each.rate for each in rounds] for rounds in (on, off)]
        segments = [[each.segments for each in rounds] for rounds in (on, off)]
        which = f"{case}, {senders} send" + (" (default)" if senders == _DEFAULT else "")
        limit = [_payload_rate()]
        rows += [
            Row.of_speeds(which, "MB/s", rates[0], _WITHOUT, rates[1], limit),
            Row.of_times(f"{which}: sent", "segments", segments[0], _WITHOUT, segments[1]),
        ]
    packets = [[each.packets for each in rounds] for rounds in (found[_DEFAULT], off)]
    through = f"{case}: at its port"
    return [*rows, Row.of_times(through, "packets", packets[0], _WITHOUT, packets[1])]


def _measured(setting: Setting, servers: int) -> dict[int, list[Measured]]:
    """Measures all rounds and returns them by the number of senders."""
    block = servers * _CHUNK
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(servers + 1, RATE, queue_ms=QUEUE_MS))
        system = stack.enter_context(LabFileSystem(setting.work / "incast", lab))
        clients = {
            senders: stack.enter_context(system.client(f"client of {senders}", senders))
            for senders in (*SENDERS, _OFF)
        }
        count = max(1, setting.sizes.data // 8 // block)
        clients[_OFF].ask({"do": "put", "path": "/data", "bytes": count * block})

        def reading(client: Worker) -> Callable[[], Measured]:
            return lambda: _read(lab, client, block, count, setting)

        runs = {str(senders): reading(client) for senders, client in clients.items()}
        found = interleaved(runs, setting.spec.rounds)
    return {int(senders): rounds for senders, rounds in found.items()}


def _missing(case: str, reason: str) -> Row:
    return Row(
        case=case, unit="MB/s", ours=0.0, peer=reason, peer_value=None, ratio=None, bound=None,
        of_bound=None, rounds=0, spread=1.0, goal=None,
    )  # fmt: skip


def _payload_rate() -> float:
    """Returns the payload rate of TCP on the cable, in MB/s."""
    return parse_rate(RATE) / 8 / _MB * 1448 / 1514


def _read(lab: Lab, worker: Worker, block: int, count: int, setting: Setting) -> Measured:
    """Reads the file once, from all servers at a time."""
    setting.say(f"incast: {worker.name}")
    command = {
        "do": "read", "path": "/data", "block": block, "depth": 1, "count": count, "seed": 0,
    }  # fmt: skip
    before = lab.switched(0), _segments(lab)
    taken = together([worker], [command])
    after = lab.switched(0), _segments(lab)
    through, dropped = (b - a for a, b in zip(before[0], after[0], strict=True))
    sent, again = (b - a for a, b in zip(before[1], after[1], strict=True))
    return Measured(
        block * count / _MB / taken,
        1000 * (through + dropped) / max(1, through),
        1000 * sent / max(1, sent - again),
    )


def _segments(lab: Lab) -> tuple[int, int]:
    """Returns the number of TCP segments sent so far by all servers, and of their
    retransmissions."""
    sent = again = 0
    for host in lab.hosts[1:]:
        text = host.call(Path("/proc/thread-self/net/snmp").read_text)
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        counted = dict(zip(names, values, strict=True))
        sent += int(counted["OutSegs"]) + int(counted["RetransSegs"])
        again += int(counted["RetransSegs"])
    return sent, again
