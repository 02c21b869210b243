"""Lab: hosts on one machine, joined by a virtual switch. A host is a network namespace."""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self, TypeVar

from fireflyer.errors import LabError
from fireflyer.lab import namespaces

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MAX_HOSTS = 250
_numbers = itertools.count()
_Stream = int | IO[Any] | None

T = TypeVar("T")


def parse_rate(rate: str) -> int:
    """Returns the bits per second of "1gbit", "200mbit" or "64kbit".

    Raises:
        LabError: if the text is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    bits = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if bits <= 0:
        raise LabError(f'invalid rate {rate!r}: expected e.g. "1gbit" or "200mbit"')
    return bits


class Host:
    """Host of a lab. Counters and `enter` need namespaces: on loopback they raise LabError."""

    def __init__(self, index: int, address: str, interface: str, namespace: str | None) -> None:
        self.index = index
        self.name = f"h{index}"
        self.address = address
        self.interface = interface
        self.namespace = namespace

    @property
    def prefix(self) -> list[str]:
        """Prefix of a command that runs it on the host."""
        return [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]

    @property
    def tx_bytes(self) -> int:
        """Bytes that the host's network interface has sent, Ethernet headers included."""
        return self._counters()[8]

    @property
    def rx_bytes(self) -> int:
        """Bytes that the host's network interface has received, Ethernet headers included."""
        return self._counters()[0]

    def enter(self) -> None:
        """Moves the calling thread into the host. Meant for a child process right after its fork."""
        namespaces.enter(self._isolated("be entered"))

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function inside the host, in a thread; its sockets belong to the host."""
        return function() if self.namespace is None else namespaces.inside(self.namespace, function)

    def free_port(self) -> int:
        """Returns a TCP port that has no listener on the host now."""

        def bind() -> int:
            with socket.socket() as probe:
                probe.bind((self.address, 0))
                return int(probe.getsockname()[1])

        return self.call(bind)

    def _counters(self) -> list[int]:
        text = namespaces.inside(
            self._isolated("count bytes"), Path("/proc/thread-self/net/dev").read_text
        )
        for line in text.splitlines():
            device, _, numbers = line.partition(":")
            if device.strip() == self.interface:
                return [int(number) for number in numbers.split()]
        raise LabError(f"{self.name} no longer has the interface {self.interface}")

    def _isolated(self, what: str) -> str:
        if self.namespace is None:
            raise LabError(
                f"{self.name} is only the loopback address {self.address} and cannot {what}"
            )
        return self.namespace


class Lab:
    """Hosts joined by one switch, as a context manager; leaving it removes everything.

    Each host is a network namespace with one interface, eth0, on a bridge. Each link is shaped to
    `rate` in both directions. A process belongs to the host of its namespace, regardless of its
    group or parent. Not thread-safe.
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: str | None = None,
        *,
        fallback: bool = False,
        queue_ms: float = 50.0,
    ) -> None:
        """Stores the settings; entering the context sets the lab up.

        Args:
            hosts: number of hosts, 1 to 250.
            rate: rate of each link, e.g. "1gbit"; None leaves the links unshaped.
            queue_ms: length of the queue at each end of a shaped link: the ms that sending a full
                queue takes. Packets beyond it are dropped.
            fallback: if namespaces cannot be created, use 127.0.x.y addresses: no shaping, no
                counters, no links to cut.

        Raises:
            LabError: if the arguments are invalid; entering raises it if the lab cannot be set up.
        """
        if not 1 <= hosts <= _MAX_HOSTS:
            raise LabError(f"invalid number of hosts {hosts}: expected 1 to {_MAX_HOSTS}")
        self._bits = None if rate is None else parse_rate(rate)
        if queue_ms <= 0:
            raise LabError(f"invalid queue of {queue_ms:g} ms: expected a time above 0")
        self._fallback, self._queue_ms = fallback, queue_ms
        self._count = hosts
        self._number = next(_numbers)
        self._pid = os.getpid()
        self._processes: dict[int, list[subprocess.Popen[bytes]]] = {}
        self._old_sigterm: Callable[[int, FrameType | None], Any] | int | None = None
        self._switch: str | None = None
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        reason = namespaces.why_not()
        if reason is not None and not self._fallback:
            raise LabError(f"no lab here: {reason}")
        self._catch_sigterm()
        try:
            if reason is None:
                self._build()
            else:
                base = (self._pid * 7 + self._number) % 254 + 1
                self.hosts = [
                    Host(i, f"127.0.{base}.{i + 1}", "lo", None) for i in range(self._count)
                ]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolated(self) -> bool:
        """True if the hosts are namespaces, with counters and links, and not loopback addresses."""
        return self._switch is not None

    def close(self) -> None:
        """Kills every process of every host, removes the hosts; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        try:
            for host in self.hosts:
                self._end(host)
            namespaces.remove(self._namespaces())
        finally:
            self.hosts, self._switch = [], None
            self._release_sigterm()

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: _Stream = None,
        stdout: _Stream = None,
        stderr: _Stream = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host, in its own session.

        Args:
            env: variables that are added to this process's environment.

        Raises:
            LabError: if the command does not exist.
        """
        place = self.hosts[host]
        environment = {**os.environ, **(env or {})}
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise LabError(f"cannot run {argv[0]!r} on {place.name}: there is no such program")
        try:
            process = subprocess.Popen(
                [*place.prefix, *argv],
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise LabError(f"cannot run {argv[0]!r} on {place.name}: {error.strerror}") from error
        self._processes.setdefault(host, []).append(process)
        return process

    def run(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command on a host until it ends, and captures its output.

        Raises:
            LabError: if the command does not exist, or exceeds `timeout_s` (it is killed).
        """
        process = self.popen(
            host,
            argv,
            env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            namespaces.end_all(lambda: namespaces.in_sessions({process.pid}))
            process.communicate()
            raise LabError(
                f"{argv[0]!r} on {self.hosts[host].name} took longer than {timeout_s:g} s"
            ) from None
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def job_env(self, host: int, port: int) -> dict[str, str]:
        """Returns the environment of a distributed program with one process per host.

        Args:
            port: port of the rendezvous on host 0; `hosts[0].free_port()` finds one.
        """
        place = self.hosts[host]
        return {
            "FIREFLYER_LAB_HOST": str(host),
            "FIREFLYER_LAB_HOSTS": str(len(self.hosts)),
            "FIREFLYER_NODE": place.name,
            "FIREFLYER_IFNAME": place.interface,
            # gloo would use the address of the host name, which is the real machine's.
            "GLOO_SOCKET_IFNAME": place.interface,
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "RANK": str(host),
            "WORLD_SIZE": str(len(self.hosts)),
        }

    def kill(self, host: int) -> None:
        """Kills every process of a host with SIGKILL, and waits until all have ended.

        All processes are stopped first, so no process can react to the end of another.
        """
        self._end(self.hosts[host])

    def freeze(self, host: int) -> None:
        """Sends SIGSTOP to all processes of a host, and waits until all are stopped. The host's
        link stays up."""
        namespaces.stop_all(lambda: self._members(self.hosts[host]))

    def thaw(self, host: int) -> None:
        """Continues every process of a host with SIGCONT."""
        namespaces.send(self._members(self.hosts[host]), signal.SIGCONT)

    def cut(self, host: int) -> None:
        """Cuts a host's link: the interface loses its carrier in both directions."""
        self._cable(host, "down")

    def mend(self, host: int) -> None:
        """Restores a host's link."""
        self._cable(host, "up")

    def switched(self, host: int) -> tuple[int, int]:
        """Returns the numbers of packets to a host that the switch has sent and has dropped.

        Raises:
            LabError: without namespaces, or if the links are not shaped.
        """
        if self._switch is None or self._bits is None:
            raise LabError("packet counters need a lab with namespaces and a rate")
        output = namespaces.tool(
            "tc", "-n", self._switch, "-s", "-j", "qdisc", "show", "dev", f"p{host}"
        )
        counted = json.loads(output)[0]
        return int(counted["packets"]), int(counted["drops"])

    def _cable(self, host: int, state: str) -> None:
        if self._switch is None:
            raise LabError("loopback hosts have no cables: use a lab with namespaces")
        namespaces.tool(
            "ip", "-n", self._switch, "link", "set", f"p{self.hosts[host].index}", state
        )

    def _members(self, host: Host) -> set[int]:
        if host.namespace is not None:
            return namespaces.members([host.namespace])
        return namespaces.in_sessions(
            {process.pid for process in self._processes.get(host.index, [])}
        )

    def _end(self, host: Host) -> None:
        # A new process may not be in its namespace yet; its session identifies it.
        processes = self._processes.get(host.index, [])
        sessions = {process.pid for process in processes}

        def alive() -> set[int]:
            return namespaces.in_sessions(sessions) | self._members(host)

        namespaces.stop_all(alive)  # like a power loss: no process can react to another's end
        namespaces.end_all(alive)
        for process in processes:
            process.wait()
        self._processes[host.index] = []

    def _namespaces(self) -> list[str]:
        roles = ["switch", *(f"h{index}" for index in range(self._count))]
        return [namespaces.namespace_name(self._number, role) for role in roles]

    def _build(self) -> None:
        switch, *names = self._namespaces()
        for name in (switch, *names):
            namespaces.make(name)
        lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        for index, name in enumerate(names):
            lines.append(f"link add p{index} type veth peer name eth0 netns {name}")
            lines.append(f"link set p{index} master br0 up")
        namespaces.tool("ip", "-n", switch, "-batch", "-", lines=lines)
        for index, name in enumerate(names):
            address = f"10.77.0.{index + 1}"
            lines = [f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"]
            namespaces.tool("ip", "-n", name, "-batch", "-", lines=lines)
            self._shape(name, "eth0")
            self._shape(switch, f"p{index}")
            self.hosts.append(Host(index, address, "eth0", name))
        self._switch = switch

    def _shape(self, namespace: str, device: str) -> None:
        if self._bits is None:
            return
        # The shaper reaches the rate only if its token bucket holds the bytes that may be sent
        # between two of its wake-ups.
        burst = max(256 << 10, self._bits // 8 // 500)
        namespaces.tool(
            *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{self._bits}bit", "burst", f"{burst}b", "latency", f"{self._queue_ms:g}ms"),
        )

    def _catch_sigterm(self) -> None:
        """Makes SIGTERM leave the `with` block, unless the program handles SIGTERM itself."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_sigterm = signal.signal(signal.SIGTERM, _leave)

    def _release_sigterm(self) -> None:
        if self._old_sigterm is not None and signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, self._old_sigterm)
        self._old_sigterm = None


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def remove_stale() -> list[str]:
    """Kills the processes in labs of dead owners, removes the labs, and returns their namespaces.

    Raises:
        LabError: without root or iproute2.
    """
    reason = namespaces.why_not()
    if reason is not None:
        raise LabError(f"no lab here: {reason}")
    names = namespaces.stale()
    namespaces.remove(names)
    return names
