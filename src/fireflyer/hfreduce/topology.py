"""Who is where: a rank's card, the hosts that all cards make up, and the control links between
them."""

import os
import socket
import struct
from dataclasses import dataclass

import msgspec

from fireflyer.errors import CollectiveError


class Card(msgspec.Struct, frozen=True):
    """What a rank tells the others about itself."""

    machine: str
    """Boot id: equal for all processes that share cores."""
    host: str
    """Equal for ranks that may share memory: boot id, network namespace and FIREFLYER_NODE."""
    unix: str
    """Name of its process' abstract Unix socket, without the leading zero byte."""
    address: str
    port: int
    zone: str = ""
    """FIREFLYER_ZONE: hosts of one label are near each other; trees cross between zones once."""
    cpus: tuple[int, ...] = ()
    """Cores that it may use, as this and the next two are meant in `cores`."""
    quota: float = 0.0
    spin: bool | None = None
    group: str = ""
    """In the card of rank 0 at the rendezvous: the group's random number, in hexadecimal."""
    rules: tuple[tuple[int, int, int, int, int], ...] = ()
    """Choice of algorithms; those of rank 0's card count. See `rules`."""
    refusal: str = ""
    """Why this rank cannot take part at the rendezvous, nor the others without it."""
    transport: str = "tcp"
    """What carries bytes to it from other hosts; empty for a newcomer, who takes the group's. See
    `transport`."""
    lack: str = ""
    """Why this rank cannot use that transport."""
    member: int = 0
    """Tells apart those who are members of one group in one process."""


@dataclass(frozen=True)
class Topology:
    """Computed alike by every rank from all cards.

    Attributes:
        hosts: the ranks of each host, both in order of rank.
        zones: a number a host, equal for hosts of one zone.
    """

    hosts: tuple[tuple[int, ...], ...]
    zones: tuple[int, ...]

    @classmethod
    def of(cls, cards: list[Card]) -> "Topology":
        by_host: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            by_host.setdefault(card.host, []).append(rank)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        labels = [cards[ranks[0]].zone for ranks in hosts]
        return cls(hosts, tuple(labels.index(label) for label in labels))

    def place(self, rank: int) -> tuple[int, int]:
        """Index of the rank's host, and its place among that host's ranks."""
        for index, ranks in enumerate(self.hosts):
            if rank in ranks:
                return index, ranks.index(rank)
        raise ValueError(f"rank {rank} is on no host")

    def control_links(self) -> set[tuple[int, int]]:
        """Pairs of ranks, the lower first, that a control link joins.

        All pairs of a host; and from host h to the hosts h + 1, 2, 4, ... around the circle of
        hosts, each rank to the one in its place there, modulo that host's size. So news reach
        everybody in at most log2(hosts) + 1 steps, and several deaths do not cut the graph.
        """
        links: set[tuple[int, int]] = set()
        count = len(self.hosts)
        for index, ranks in enumerate(self.hosts):
            links.update((a, b) for a in ranks for b in ranks if a < b)
            step = 1
            while step < count:
                others = self.hosts[(index + step) % count]
                for place, rank in enumerate(ranks):
                    other = others[place % len(others)]
                    links.add((min(rank, other), max(rank, other)))
                step *= 2
        return links


def boot_id() -> str:
    """Of this machine since its start."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def host_key(boot: str) -> str:
    """Equal for processes that may share memory."""
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}/{namespace}/{os.environ.get('FIREFLYER_NODE', '')}"


def interface_address(master: str) -> str:
    """The IPv4 address that peers reach this process at: of FIREFLYER_IFNAME, or of the route to
    `master`.

    Raises:
        CollectiveError: the interface is unknown or has no IPv4 address.
    """
    if name := os.environ.get("FIREFLYER_IFNAME"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("16s24x", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError as error:
                raise CollectiveError(
                    f"FIREFLYER_IFNAME={name}: no IPv4 address on that interface ({error.strerror})"
                ) from error
        return socket.inet_ntoa(answer[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing; only asks for the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
