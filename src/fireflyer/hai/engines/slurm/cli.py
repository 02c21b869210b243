"""Slurm's commands and parsers of their text output. The parsers use text because the layout of
--json changes with releases.

Every call blocks until the command ends, so the engine calls from threads. Commands inherit only a
few environment variables, so that slurmctld and jobs do not see the rest of the server's
environment.
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
from fireflyer.hai.model.engine import Node

COMMAND_S = 30.0
"""Timeout of a command in seconds. If slurmctld is down, commands fail after about 10 s."""

_INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "SLURM_CONF"),
)
_UNREACHABLE = re.compile(
    r"unable to contact|connection refused|timed out|zero bytes|standby mode|not connected", re.I
)
_UP = {"idle", "allocated", "mixed", "completing", "planned"}
_DRAINED = {"draining", "drained", "maint", "reserved", "failing", "inval", "reboot"}
_OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
_OVER |= {"PREEMPTED", "REVOKED", "TIMEOUT"}


def final(state: str) -> bool:
    """Returns whether a job in this state of Slurm is over."""
    return state in _OVER


class JobLine(msgspec.Struct, frozen=True):
    """Job as squeue reports it."""

    id: int
    state: str
    """State: PENDING, RUNNING, COMPLETING, COMPLETED, ..."""
    nodes: frozenset[str]
    """Nodes that the job requested."""
    name: str

    @property
    def over(self) -> bool:
        return final(self.state)


class TreePosition(msgspec.Struct, frozen=True):
    """Position of a node in the tree of switches."""

    leaf: str = ""
    zone: str = ""


class PartitionNode(msgspec.Struct, frozen=True):
    """Node and its address."""

    node: Node
    address: str
    unresponsive: bool = False
    """True if the node does not respond yet, or if slurmctld has restarted and has not contacted
    the node. The node may come back or go down."""


class Share(msgspec.Struct, frozen=True):
    """Resources that a job gets on each of its nodes."""

    gpus: int
    whole: bool
    cpus: int = 0
    """0: all CPUs of a whole node."""
    memory_mib: int = 0
    """MiB; 0: Slurm's default, or all memory of a whole node."""
    gpu_type: str = ""
    """Type in Slurm's gres; empty: any."""

    def options(self) -> list[str]:
        """Returns the options for sbatch."""
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        found = [f"--gres=gpu:{kind}{self.gpus}"] if self.gpus else []
        cpus = [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        if self.whole:
            memory = f"--mem={self.memory_mib}M" if self.memory_mib else "--mem=0"
            return ["--exclusive", *cpus, memory, *found]
        memories = [f"--mem={self.memory_mib}M"] if self.memory_mib else []
        return [*cpus, *memories, *found]


def share_of(
    gpus: int, memory_mib: int, nodes: Iterable[Node], *, cpus: int = 0, typed: bool = False
) -> Share:
    """Returns the share of a gang that asks for `gpus` (0: whole nodes), `memory_mib` and `cpus` of
    each node. If the gang asks for no CPUs or no memory, the share has them in proportion to the
    GPUs, computed from the smallest node. `typed`: the gang asks for a type of GPU. The job then
    names the type in Slurm's gres, if all nodes have the same type."""
    nodes = list(nodes)
    least = min((node.gpus for node in nodes), default=0)
    if not gpus or not least or any(node.whole for node in nodes):
        return Share(least, whole=True, cpus=cpus, memory_mib=memory_mib)
    cpus = cpus or max(1, min(node.cpus * gpus // node.gpus for node in nodes))
    memory = min(node.memory_mib * gpus // node.gpus for node in nodes)
    kinds = {node.gpu_type for node in nodes}
    kind = kinds.pop() if typed and len(kinds) == 1 else ""
    return Share(gpus, whole=False, cpus=cpus, memory_mib=memory_mib or memory, gpu_type=kind)


class Slurm:
    """Slurm's commands for one partition."""

    def __init__(self, partition: str = "") -> None:
        """Checks that Slurm can be used.

        Args:
            partition: name; empty: the cluster's default.

        Raises:
            ConfigError: Slurm is not installed, does not answer, or has no such partition.
        """
        try:
            self.partition = partition or self._default()
            self.positions = self._positions()
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
        known = ", ".join(names)
        raise TaskError(f"Slurm has no default partition: give --partition, one of {known}")

    def _positions(self) -> dict[str, TreePosition]:
        """Returns the position of each node; empty if the cluster has no tree of switches."""
        try:
            text = self._run("scontrol", "show", "topology")
        except TaskError:
            return {}
        return parse_tree(text)

    def _gives_whole_nodes(self) -> bool:
        """Returns whether a job of the partition always gets whole nodes."""
        text = self._run("scontrol", "show", "partition", self.partition)
        plugin = re.search(
            r"^SelectType\s*=\s*(\S+)", self._run("scontrol", "show", "config"), re.M
        )
        return "OverSubscribe=EXCLUSIVE" in text or (
            plugin is not None and plugin[1] == "select/linear"
        )

    def places(self) -> list[PartitionNode]:
        """Returns the current nodes of the partition.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: slurmctld rejects the request.
        """
        form = "%N|%o|%T|%G|%m|%c|%E"
        text = self._run("sinfo", "-h", "-N", "-p", self.partition, "-o", form)
        return [parse_node(line, self.positions, whole=self.whole) for line in text.splitlines()]

    def jobs(self, prefix: str) -> list[JobLine]:
        """Returns this user's jobs whose names begin with `prefix`, including jobs that ended
        recently.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: slurmctld rejects the request.
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
        """Submits the job that starts supervisors; returns its number.

        Args:
            name: name by which `jobs` finds the job.
            nodes: names of the nodes.
            share: share of each node.
            attempt: the folder of the first attempt.

        Raises:
            PeerLost: slurmctld does not answer; the job may exist.
            TaskError: slurmctld rejects the job.
        """
        command = [sys.executable, "-P", "-m", "fireflyer.hai.engines.slurm.node", str(attempt)]
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
        """Cancels a job, if it is not over.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: slurmctld rejects the request.
        """
        self._run("scancel", "--quiet", str(job))

    def mark(self, node: str, state: Literal["drain", "resume"], reason: str) -> None:
        """Drains or resumes a node.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: slurmctld rejects the change, e.g. because the user is no operator.
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
            kind = PeerLost if _UNREACHABLE.search(said) else TaskError
            raise kind(f"{command[0]}: {said}")
        return done.stdout


def parse_node(
    line: str, positions: dict[str, TreePosition], *, whole: bool = False
) -> PartitionNode:
    """Parses a line of `sinfo -o "%N|%o|%T|%G|%m|%c|%E"`."""
    name, address, state, gres, memory, cpus, reason = line.split("|", 6)
    plain = state.rstrip("*~#!%$@^-+")
    unresponsive = plain == "unknown" or (plain in _UP and "*" in state)
    usable: Literal["up", "drained", "down"] = "down"
    if plain in _UP and not unresponsive:
        usable = "up"
    elif unresponsive or plain in _DRAINED:
        usable = "drained"
    why = "" if usable == "up" else f"{state}: {reason}" if reason != "none" else state
    gpus = re.findall(r"(?:^|,)gpu(?::([^,:]+))?:(\d+)", re.sub(r"\([^)]*\)", "", gres))
    kinds = {kind for kind, _ in gpus}
    spot = positions.get(name, TreePosition())
    node = Node(
        name=name, state=usable, reason=why, gpus=sum(int(count) for _, count in gpus),
        gpu_type=kinds.pop() if len(kinds) == 1 else "", indexed=False, cpus=int(cpus),
        memory_mib=int(memory), leaf=spot.leaf, zone=spot.zone, whole=whole,
    )  # fmt: skip
    return PartitionNode(node, address, unresponsive)


def parse_tree(text: str) -> dict[str, TreePosition]:
    """Parses the switch tree of `scontrol show topology`: node -> leaf and zone. Ignores the lines
    of a block topology.

    The leaf is the lowest switch above a node. The zone is the highest switch above the leaf that
    does not cover every node of the tree. In a tree with several roots the zone is a root.
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
    return {node: TreePosition(leaf, zones.get(node, "")) for node, leaf in leaves.items()}


def expand_hosts(text: str) -> list[str]:
    """Returns the names in a host list such as "login,gpu[001-003,7]-ib"."""
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> Iterable[str]:
    """Splits at the commas outside brackets."""
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
