"""Placement of ranks: a rank's info, the hosts that all infos describe, and their control links."""

import os
import socket
import struct
from dataclasses import dataclass

import msgspec

from fireflyer.errors import CollectiveError


class RankInfo(msgspec.Struct, frozen=True):
    """Data about a rank that the rank publishes to the other ranks."""

    machine: str
    """Boot id; equal for all processes that share cores."""
    host: str
    """Key of ranks that may share memory: boot id, network namespace and FIREFLYER_NODE."""
    unix: str
    """Name of the process's abstract Unix socket, without the leading zero byte."""
    address: str
    port: int
    zone: str = ""
    """FIREFLYER_ZONE: hosts with equal labels are near each other; trees cross between zones
    once."""
    cpus: tuple[int, ...] = ()
    """Cores that the rank may use; see `cores` for this field and the next two."""
    quota: float = 0.0
    spin: bool | None = None
    group: str = ""
    """Random number of the group, in hexadecimal; only in rank 0's info at the rendezvous."""
    rules: tuple[tuple[int, int, int, int, int], ...] = ()
    """Rules that choose algorithms; only those of rank 0 count. See `rules`."""
    refusal: str = ""
    """Reason why this rank, and therefore the group, cannot start at the rendezvous."""
    transport: str = "tcp"
    """Transport that carries bytes from other hosts to the rank; see `transport`.

    Empty for a newcomer, which adopts the group's transport.
    """
    lack: str = ""
    """Reason why this rank cannot use that transport."""
    member: int = 0
    """Number that distinguishes members of one group in one process."""


@dataclass(frozen=True)
class Topology:
    """Hosts and zones of a group. Every rank computes the same result from all infos.

    Attributes:
        hosts: ranks of each host; hosts and ranks are in order of rank.
        zones: a number per host, equal for hosts of one zone.
    """

    hosts: tuple[tuple[int, ...], ...]
    zones: tuple[int, ...]

    @classmethod
    def of(cls, infos: list[RankInfo]) -> "Topology":
        by_host: dict[str, list[int]] = {}
        for rank, info in enumerate(infos):
            by_host.setdefault(info.host, []).append(rank)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        labels = [infos[ranks[0]].zone for ranks in hosts]
        return cls(hosts, tuple(labels.index(label) for label in labels))

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the index of the rank's host, and the rank's index among that host's ranks."""
        for index, ranks in enumerate(self.hosts):
            if rank in ranks:
                return index, ranks.index(rank)
        raise ValueError(f"rank {rank} is on no host")

    def control_links(self) -> set[tuple[int, int]]:
        """Returns the pairs of ranks, lower rank first, that a control link connects.

        Links connect all pairs of a host. Further links lead from host h to the hosts h + 1, h + 2,
        h + 4, ... around the circle of hosts. There, a rank's link leads to the rank with the same
        index, modulo that host's size. So the news of a death reaches every rank in at most
        log2(hosts) + 1 steps, and several deaths do not partition the graph.
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
    """Returns the id of this machine's current boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def host_key(boot: str) -> str:
    """Returns a key that is equal for all processes that may share memory."""
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}/{namespace}/{os.environ.get('FIREFLYER_NODE', '')}"


def interface_address(master: str) -> str:
    """Returns the IPv4 address at which peers reach this process.

    This is the address of the interface FIREFLYER_IFNAME, or else of the interface on the route to
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
            probe.connect((master, 9))  # sends nothing; only looks up the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
