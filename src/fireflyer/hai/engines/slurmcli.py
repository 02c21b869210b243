"""Slurm's commands, and what their text says. Text, because the layout of --json changes with releases.

Every call blocks for as long as the command takes; the engine calls from threads. Commands get a handful of
variables, so nothing of the server's environment reaches slurmctld or a job.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fireflyer.errors import ConfigError, PeerLost, TaskError
from fireflyer.hai.engines import Node

COMMAND_S = 30.0
"""The longest that a command may take; with slurmctld away they give up after about 10 s."""

_INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "SLURM_CONF"),
)
_SILENT = re.compile(
    r"unable to contact|connection refused|timed out|zero bytes|standby mode|not connected", re.I
)
_UP = {"idle", "allocated", "mixed", "completing", "planned"}
_DRAINED = {"draining", "drained", "maint", "reserved", "failing", "inval", "reboot"}
_OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
_OVER |= {"PREEMPTED", "REVOKED", "TIMEOUT"}


def final(state: str) -> bool:
    """Whether a job that Slurm calls so is over."""
    return state in _OVER


class JobLine(msgspec.Struct, frozen=True):
    """A job as squeue has it."""

    id: int
    state: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, ..."""
    nodes: frozenset[str]
    """That it asked for."""
    name: str

    @property
    def over(self) -> bool:
        return final(self.state)


class Spot(msgspec.Struct, frozen=True):
    """Where a node is in the tree of switches."""

    leaf: str = ""
    zone: str = ""


class Place(msgspec.Struct, frozen=True):
    """A node, and where it is reached."""

    node: Node
    address: str
    silent: bool = False
    """Slurm hears nothing of it as yet, or has begun and not asked it: it may come back, or go down."""


class Share(msgspec.Struct, frozen=True):
    """What a job gets of each of its nodes."""

    gpus: int
    whole: bool
    cpus: int = 1
    memory_mib: int = 0
    """0: whatever Slurm gives by default. Like `cpus` of no account where the nodes are taken whole."""

    def options(self) -> list[str]:
        """Of sbatch."""
        found = [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        if self.whole:
            return ["--exclusive", "--mem=0", *found]
        memory = [f"--mem={self.memory_mib}M"] if self.memory_mib else []
        return [f"--cpus-per-task={self.cpus}", *memory, *found]


def share_of(gpus: int, memory_mib: int, nodes: Iterable[Node]) -> Share:
    """What a gang gets that asks for so many GPUs (0: whole nodes) and so much memory of each node: GPUs as
    asked for; CPUs, and memory where none is asked for, in the same proportion, by the smallest of the nodes.
    """
    nodes = list(nodes)
    least = min((node.gpus for node in nodes), default=0)
    if not gpus or not least or any(node.whole for node in nodes):
        return Share(least, whole=True)
    cpus = min(node.cpus * gpus // node.gpus for node in nodes)
    memory = min(node.memory_mib * gpus // node.gpus for node in nodes)
    return Share(gpus, whole=False, cpus=max(1, cpus), memory_mib=memory_mib or memory)


class Slurm:
    """The commands, for one partition."""

    def __init__(self, partition: str = "") -> None:
        """
        Args:
            partition: empty: the cluster's default.

        Raises:
            ConfigError: Slurm is not installed, does not answer, or has no such partition.
        """
        try:
            self.partition = partition or self._default()
            self.spots = self._spots()
            self.whole = self._gives_whole_nodes()
            if not self.places():
                raise TaskError(f"the partition {self.partition!r} has no nodes")
        except (PeerLost, TaskError) as error:
            raise ConfigError(f"cannot use Slurm: {error}") from error

    def _default(self) -> str:
        names = self._run("sinfo", "-h", "-o", "%P").split()
        for name in names:
            if name.endswith("*"):
                return name[:-1]
        raise TaskError(f"no partition is the default one; name one of {', '.join(names)}")

    def _spots(self) -> dict[str, Spot]:
        """By node; empty where the cluster has no tree."""
        try:
            text = self._run("scontrol", "show", "topology")
        except TaskError:
            return {}
        return parse_tree(text)

    def _gives_whole_nodes(self) -> bool:
        """Whether a job of the partition has its nodes alone, whatever it asks for."""
        text = self._run("scontrol", "show", "partition", self.partition)
        plugin = re.search(
            r"^SelectType\s*=\s*(\S+)", self._run("scontrol", "show", "config"), re.M
        )
        return "OverSubscribe=EXCLUSIVE" in text or (
            plugin is not None and plugin[1] == "select/linear"
        )

    def places(self) -> list[Place]:
        """The partition's nodes as of now.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: it refuses.
        """
        form = "%N|%o|%T|%G|%m|%c|%E"
        text = self._run("sinfo", "-h", "-N", "-p", self.partition, "-o", form)
        return [parse_node(line, self.spots, whole=self.whole) for line in text.splitlines()]

    def jobs(self, prefix: str) -> list[JobLine]:
        """This user's jobs whose names begin so, those that ended a while ago too.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: it refuses.
        """
        text = self._run("squeue", "-h", "--me", "-t", "all", "-o", "%A|%T|%n|%j")
        jobs = []
        for line in text.splitlines():
            number, state, nodes, name = line.split("|", 3)
            if name.startswith(prefix):
                asked = frozenset(expand_hosts(nodes))
                jobs.append(JobLine(int(number), state, asked, name))
        return jobs

    def submit(self, name: str, nodes: Sequence[str], share: Share, attempt: Path) -> int:
        """Submits the job that starts supervisors; its number.

        Args:
            name: by which it is found again.
            nodes: by name.
            share: of each node.
            attempt: the folder of the first attempt.

        Raises:
            PeerLost: slurmctld does not answer; the job may exist.
            TaskError: it refuses.
        """
        command = [sys.executable, "-P", "-m", "fireflyer.hai.engines.slurmnode", str(attempt)]
        srun = "srun --mpi=none --cpu-bind=none --kill-on-bad-exit=0 --wait=0"
        task = attempt.parent
        options = [
            *("--parsable", "--no-requeue", "--ntasks-per-node=1", *share.options()),
            *(f"--job-name={name}", f"--partition={self.partition}", f"--chdir={task}"),
            *(f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"),
            *("--open-mode=append", f"--output={str(task).replace('%', '%%')}/slurm-%j.log"),
        ]
        script = f"#!/bin/sh\nexec {srun} {shlex.join(command)}\n"
        return int(self._run("sbatch", *options, text=script).split(";")[0])

    def cancel(self, job: int) -> None:
        """Ends a job, if it is not over.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: it refuses.
        """
        self._run("scancel", "--quiet", str(job))

    def mark(self, node: str, state: Literal["drain", "resume"], reason: str) -> None:
        """Drains a node or takes it back.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: it refuses, e.g. a user who is no operator.
        """
        change = [f"nodename={node}", f"state={state}"]
        self._run("scontrol", "update", *change, *([f"reason={reason}"] if reason else []))

    def _run(self, *command: str, text: str = "") -> str:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        try:
            done = subprocess.run(
                command, input=text, env=environment, capture_output=True, text=True,
                timeout=COMMAND_S, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise TaskError(f"{command[0]} is not installed here") from None
        except subprocess.TimeoutExpired:
            raise PeerLost(f"{command[0]} got no answer within {COMMAND_S:.0f} s") from None
        if done.returncode:
            said = "; ".join(done.stderr.split("\n")).strip("; ") or f"status {done.returncode}"
            kind = PeerLost if _SILENT.search(said) else TaskError
            raise kind(f"{command[0]}: {said}")
        return done.stdout


def parse_node(line: str, spots: dict[str, Spot], *, whole: bool = False) -> Place:
    """A line of `sinfo -o "%N|%o|%T|%G|%m|%c|%E"`."""
    name, address, state, gres, memory, cpus, reason = line.split("|", 6)
    plain = state.rstrip("*~#!%$@^-+")
    silent = plain == "unknown" or (plain in _UP and "*" in state)
    usable: Literal["up", "drained", "down"] = "down"
    if plain in _UP and not silent:
        usable = "up"
    elif silent or plain in _DRAINED:
        usable = "drained"
    why = "" if usable == "up" else f"{state}: {reason}" if reason != "none" else state
    counts = re.findall(r"(?:^|,)gpu(?::[^,:]+)?:(\d+)", re.sub(r"\([^)]*\)", "", gres))
    spot = spots.get(name, Spot())
    node = Node(
        name=name, state=usable, reason=why, gpus=sum(map(int, counts)), cpus=int(cpus),
        memory_mib=int(memory), leaf=spot.leaf, zone=spot.zone, whole=whole,
    )  # fmt: skip
    return Place(node, address, silent)


def parse_tree(text: str) -> dict[str, Spot]:
    """What `scontrol show topology` says of a tree of switches: node -> leaf and zone; of blocks: nothing.

    The leaf is the lowest switch. The zone is the highest one above it that does not hold every node of
    the tree: where there are several roots, the root.
    """
    leaves: dict[str, str] = {}
    above: list[tuple[int, str, list[str]]] = []
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        level = fields.get("Level", "")
        if "SwitchName" not in fields or not level.isdecimal():
            continue
        name, nodes = fields["SwitchName"], expand_hosts(fields.get("Nodes", ""))
        if int(level):
            above.append((int(level), name, nodes))
        else:
            leaves.update(dict.fromkeys(nodes, name))
    zones: dict[str, str] = {}
    for _, name, nodes in sorted(above):
        if not leaves.keys() <= set(nodes):
            zones.update(dict.fromkeys(nodes, name))
    return {node: Spot(leaf, zones.get(node, "")) for node, leaf in leaves.items()}


def expand_hosts(text: str) -> list[str]:
    """The names in a host list such as "login,gpu[001-003,7]-ib"."""
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> Iterable[str]:
    """At the commas that are not in brackets."""
    return (part for part in re.split(r",(?![^\[]*\])", text) if part and part != "(null)")


def _expand(part: str) -> list[str]:
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    before, ranges, after = found.groups()
    names = []
    for item in ranges.split(","):
        low, _, high = item.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        names += [f"{before}{number:0{len(low)}}" for number in numbers]
    return [name + rest for name in names for rest in _expand(after)]
