"""A real Slurm in a folder: munged, slurmctld and four slurmd of this host, on private ports.

Started and ended in about a second each. Nodes fn1, fn2 hang on leaf1, fn3, fn4 on leaf2; each poses as 8
CPUs and, where device files can be made, 8 GPUs.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

from tests.plugins.guard import marked
from tests.ports import take_ports
from tests.waiting import LIMIT_S

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
NODES = ("fn1", "fn2", "fn3", "fn4")
GPUS = 8
START_S = 10.0
DOWN_S = 8
"""SlurmdTimeout."""

CONF = """\
ClusterName=fake
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PriorityType=priority/basic
TopologyPlugin=topology/tree
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SlurmdTimeout={down}
SlurmctldTimeout=20
InactiveLimit=0
KillWait=2
MinJobAge=600
BatchStartTimeout=10
CompleteWait=0
{gres}PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=16000{gres}\n"
TOPOLOGY = """\
SwitchName=leaf1 Nodes=fn[1-2]
SwitchName=leaf2 Nodes=fn[3-4]
SwitchName=spine Switches=leaf[1-2]
"""


def missing() -> str:
    """Why there can be no Slurm here; empty: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no Slurm ({', '.join(absent)}): scripts/setup.sh --all-test-packages, as root on Debian"
    return ""


class Cluster:
    """Ended by `stop`; REQUIRES that nothing of it is asked afterwards."""

    def __init__(self, root: Path, topology: str = TOPOLOGY) -> None:
        self.root = root
        self._topology = topology
        self.conf = root / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for folder in ("state", "spool"):
            (root / folder).mkdir()
        self.gpus = GPUS if self._make_devices() else 0
        self._write()

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when all nodes are idle; raises TimeoutError with the end of the logs."""
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        names = ("munge.key", "munge.sock", "munged.pid", "munged.log", "munge.seed")
        options = [f"--{f}={self.root / n}" for f, n in zip(files, names, strict=True)]
        self._run("munged", "munged", *options, "--force", "--foreground")
        deadline = time.monotonic() + START_S
        self._await(lambda: (self.root / "munge.sock").is_socket(), deadline)
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        self._await(lambda: self.states() == dict.fromkeys(NODES, "idle"), deadline)

    def stop(self) -> None:
        """Ends every process of it, jobs too."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.command("scancel", "--state=PENDING", "-u", pwd.getpwuid(os.getuid()).pw_name)
        for name in (*NODES, "slurmctld", "munged"):
            self._end(name)
        for pid in self._owned():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_controller(self) -> None:
        self._run("slurmctld", "slurmctld", "-f", str(self.conf), "-D")

    def kill_controller(self) -> None:
        process = self._processes.pop("slurmctld")
        process.kill()
        process.wait()

    def start_node(self, name: str) -> None:
        self._run(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def signal_node(self, name: str, number: int) -> None:
        """To slurmd and, as far as it is known, everything that it runs."""
        for pid in [self._processes[name].pid, *self._owned(f"SLURMD_NODENAME={name}")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- what it says ------------------------------------------------------------------------------

    def command(self, *words: str) -> str:
        """Output of one of Slurm's commands."""
        environment = {"PATH": PATH, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=240, check=True
        )
        return done.stdout

    def states(self) -> dict[str, str]:
        """Node -> idle, allocated, drained, ..."""
        try:
            text = self.command("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T")
        except subprocess.CalledProcessError:
            return {}
        return dict(line.split() for line in text.splitlines())

    def jobs(self) -> dict[str, str]:
        """Name -> state, of jobs that are not over."""
        text = self.command("squeue", "-h", "-o", "%j %T")
        return dict(line.split() for line in text.splitlines())

    def saved(self, text: str) -> bool:
        """Whether a text of a job is in the controller's saved state."""
        state = self.root / "state" / "job_state"
        return state.exists() and text.encode() in state.read_bytes()

    # -- inside ------------------------------------------------------------------------------------

    def _owned(self, *variables: str) -> list[int]:
        """Processes with the cluster's configuration and these variables in their environment."""
        wanted = {text.encode() for text in (f"SLURM_CONF={self.conf}", *variables)}
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.append(pid)
        return [pid for pid in found if pid != os.getpid()]

    def _make_devices(self) -> bool:
        try:
            for number in range(GPUS):
                null = os.makedev(1, 3)
                os.mknod(self.root / f"gpu{number}", 0o666 | stat.S_IFCHR, null)
        except PermissionError:
            return False
        return True

    def _write(self) -> None:
        controller, *ports = take_ports(1 + len(NODES))
        gres = f" Gres=gpu:A100:{GPUS}" if self.gpus else ""
        lines = [NODE.format(name=n, port=p, gres=gres) for n, p in zip(NODES, ports, strict=True)]
        gres = ("GresTypes=gpu\n" if self.gpus else "") + "".join(lines)
        user = pwd.getpwuid(os.getuid()).pw_name
        fields = {"controller": controller, "user": user, "root": self.root, "down": DOWN_S}
        self.conf.write_text(CONF.format(gres=gres, **fields))
        if self.gpus:
            line = f"NodeName=fn[1-4] Name=gpu Type=A100 File={self.root}/gpu[0-{GPUS - 1}]\n"
            (self.root / "gres.conf").write_text(line)
        (self.root / "topology.conf").write_text(self._topology)
        (self.root / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _run(self, name: str, *command: str) -> None:
        with (self.root / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                env={"PATH": PATH, "SLURM_CONF": str(self.conf), **marked()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _await(self, ready: object, deadline: float) -> None:
        assert callable(ready)
        while not ready():
            if time.monotonic() > deadline:
                logs = [f"{p.name}: {p.read_text()[-500:]}" for p in self.root.glob("*.log")]
                self.stop()
                raise TimeoutError("Slurm does not start:\n" + "\n".join(logs))
            time.sleep(0.02)
