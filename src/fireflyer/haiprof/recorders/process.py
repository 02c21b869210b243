"""Recorders of one process: `basic`, `cpu`, `mem`, `io`. They read /proc."""

import os
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from `state` on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _pairs(path: str) -> dict[str, int]:
    """Parses lines such as `rchar: 12` or `Rss: 12 kB`."""
    found = {}
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdecimal():
            found[key] = int(number[0])
    return found


class _OfProcess:
    interval_s = 1.0

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def missing(self) -> str | None:
        return None


class Basic(_OfProcess):
    """Processor time, memory and threads of the process; load of the machine."""

    name = "basic"
    interval_s = 0.5

    def sample(self) -> dict[str, float]:
        fields = _stat(self.pid)
        children = (int(fields[13]) + int(fields[14])) * _TICK
        return {
            "cpu_s_total": (int(fields[11]) + int(fields[12])) * _TICK,
            "children_cpu_s_total": children,
            "threads": float(fields[17]),
            "rss_bytes": float(int(fields[21]) * _PAGE),
            "load": os.getloadavg()[0],
        }


class Cpu(_OfProcess):
    """Processor time and time in the run queue, of the main thread and of all threads."""

    name = "cpu"
    interval_s = 0.25

    def sample(self) -> dict[str, float]:
        run, wait, switches = 0.0, 0.0, 0
        main_run = main_wait = 0.0
        for name in os.listdir(f"/proc/{self.pid}/task"):
            try:
                words = Path(f"/proc/{self.pid}/task/{name}/schedstat").read_text().split()
            except OSError:
                continue  # the thread has ended
            run += int(words[0]) / 1e9
            wait += int(words[1]) / 1e9
            switches += int(words[2])
            if name == str(self.pid):
                main_run, main_wait = int(words[0]) / 1e9, int(words[1]) / 1e9
        return {
            "run_s_total": run,
            "queue_s_total": wait,
            "switches_total": float(switches),
            "main_run_s_total": main_run,
            "main_queue_s_total": main_wait,
        }


class Memory(_OfProcess):
    """Memory of the process: resident, private, swapped; page faults.

    The kernel takes milliseconds to sum the pages of a large process.
    """

    name = "mem"
    interval_s = 2.0

    def sample(self) -> dict[str, float]:
        fields = _stat(self.pid)
        values = {
            "rss_bytes": float(int(fields[21]) * _PAGE),
            "minor_faults_total": float(fields[7]),
            "major_faults_total": float(fields[9]),
        }
        rollup = _pairs(f"/proc/{self.pid}/smaps_rollup")
        for key, name in (("Pss", "pss_bytes"), ("Anonymous", "anonymous_bytes")):
            if key in rollup:
                values[name] = rollup[key] * 1024.0
        if "Swap" in rollup:
            values["swap_bytes"] = rollup["Swap"] * 1024.0
        return values


_TABLES = {b"TCP": "tcp", b"TCPv6": "tcp6"}
"""Files of /proc/PID/net by the kernel's name of a socket's protocol."""


class InputOutput(_OfProcess):
    """Bytes read and written, bytes on the network, and unacknowledged bytes of the process's
    sockets. `blocked_<address>` is the number of bytes that were sent to an address and not
    acknowledged.
    """

    name = "io"
    interval_s = 0.1

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._inodes: dict[str, set[str]] = {}
        self._looked = 0

    def sample(self) -> dict[str, float]:
        counters, fields = _pairs(f"/proc/{self.pid}/io"), _stat(self.pid)
        values = {
            "read_bytes_total": float(counters.get("read_bytes", 0)),
            "written_bytes_total": float(counters.get("write_bytes", 0)),
            "read_chars_total": float(counters.get("rchar", 0)),
            "written_chars_total": float(counters.get("wchar", 0)),
            "disk_wait_s_total": int(fields[39]) * _TICK,
            "in_disk_wait": float(fields[0] == "D"),
        }
        values |= self._network()
        values |= self._sockets()
        return values

    def _network(self) -> dict[str, float]:
        received = sent = 0
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            words = rest.split()
            if name.strip() != "lo":
                received += int(words[0])
                sent += int(words[8])
        return {"net_received_bytes_total": float(received), "net_sent_bytes_total": float(sent)}

    def _sockets(self) -> dict[str, float]:
        """Returns unacknowledged bytes by peer, of the sockets of this process.

        The kernel takes milliseconds to list the sockets of a busy machine. So samples read only the
        tables that have sockets of this process.
        """
        if self._looked % 20 == 0:
            self._inodes = self._own_sockets()
        self._looked += 1
        waiting: dict[str, float] = {}
        for table, inodes in self._inodes.items():
            try:
                lines = Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                continue
            for line in lines:
                words = line.split(maxsplit=10)
                if words[9] in inodes and words[3] == "01":
                    peer = f"blocked_{_address(words[2].split(':')[0])}"
                    waiting[peer] = waiting.get(peer, 0.0) + int(words[4].split(":")[0], 16)
        return waiting

    def _own_sockets(self) -> dict[str, set[str]]:
        """Returns the inode numbers of the TCP sockets of this process, by the table that lists
        them."""
        found: dict[str, set[str]] = {}
        folder = f"/proc/{self.pid}/fd"
        for name in os.listdir(folder):
            try:
                link = os.readlink(f"{folder}/{name}")
                if not link.startswith("socket:["):
                    continue
                kind = os.getxattr(f"{folder}/{name}", "system.sockprotoname")
            except OSError:
                continue
            if table := _TABLES.get(kind.rstrip(b"\0")):
                found.setdefault(table, set()).add(link[8:-1])
        return found


def _address(text: str) -> str:
    """Returns an address of /proc/net/tcp in the usual notation."""
    if len(text) > 8:
        text = text[-8:]  # IPv4 in IPv6
    return ".".join(str(int(text[at : at + 2], 16)) for at in (6, 4, 2, 0))
