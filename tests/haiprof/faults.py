"""Four ranks on four hosts of a lab, one injected fault, and the findings of haiprof.

`python -m tests.haiprof.faults --seeds 10 [KIND...]` prints one line a run. Needs root, two processors, and
for a slow disk the blkio controller.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from tests.haiprof.scripts import is_prepared
from tests.waiting import until
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from fireflyer._native.hai import set_parent_death_signal
from fireflyer.haiprof.attach.collect import Options, collect
from fireflyer.haiprof.explain import Finding, explain
from fireflyer.haiprof.inside.prepare import prepare
from fireflyer.lab import Lab

RANKS = 4
EXPECTED = {
    "cpu": "slow-rank-cpu", "disk": "slow-rank-disk", "network": "slow-network", "loader": "data",
    "lock": "lock", "leak": "memory-growth", "healthy": "",
}  # fmt: skip
"""Kind of the finding that must come first, by fault."""

OF_A_RANK = ("cpu", "disk", "network", "lock", "leak")
SAMPLE_BYTES, BATCH = 64 << 10, 4
PRIORITY = 10
"""Priority of all processes of a run over other programs of the machine."""

BLKIO = Path("/sys/fs/cgroup/blkio")


class Fault:
    """A fault and the numbers of its run, drawn by the seed."""

    def __init__(self, kind: str, seed: int) -> None:
        random = Random(f"{kind} {seed}")
        self.kind = kind
        self.victim = random.randrange(RANKS)
        self.work_s = random.uniform(0.004, 0.007)
        self.forward_s = random.uniform(0.012, 0.020)
        self.backward_s = random.uniform(0.020, 0.030)
        self.hogs = random.randint(4, 7)
        self.disk_bytes_a_second = random.randint(3 << 20, 6 << 20)
        self.network_mbit = random.randint(60, 150)
        self.sample_s = random.uniform(0.006, 0.012)
        self.held_s = random.uniform(0.02, 0.04)

    def hits(self, rank: int) -> bool:
        """Returns whether the fault is in this rank."""
        return rank == self.victim or self.kind not in OF_A_RANK


class Compute(torch.autograd.Function):
    """Uses the processor for a while and sleeps, forward and backward, as if on a device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        end = time.thread_time() + fault.work_s
        while time.thread_time() < end:
            x.sum()
        time.sleep(fault.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.fault.backward_s)
        return grads[0], None


class Model(nn.Module):
    """A quarter of a million parameters: a gradient of one megabyte."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Compute.apply(self.layers(x), self.fault)  # type: ignore[no-untyped-call]
        return y


class Samples(Dataset[torch.Tensor]):
    """Reads samples from a file that never stays in memory, at the speed of the rank's disk."""

    def __init__(self, path: Path, fault: Fault) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._fault = fault

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> torch.Tensor:
        if self._fault.kind == "loader":
            time.sleep(self._fault.sample_s)
        at = number % 64 * SAMPLE_BYTES
        data = os.pread(self._file, SAMPLE_BYTES, at)
        if self._fault.kind == "disk":
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        return torch.frombuffer(bytearray(data[:1024]), dtype=torch.uint8)[:256].float()


def train(rank: int, lab: Lab, fault: Fault, folder: Path) -> None:
    """Trains until the process is killed."""
    host = lab.hosts[rank]
    host.enter()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME=host.interface
    )  # fmt: skip
    prepare()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(Model(fault))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lock = threading.Lock()
    if fault.kind == "lock" and fault.hits(rank):
        threading.Thread(target=_hold, args=(lock, fault.held_s), daemon=True).start()
    kept = []
    for batch in DataLoader(Samples(folder / f"data{rank}", fault), BATCH):
        with lock:
            optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if fault.kind == "leak" and fault.hits(rank):
            kept.append(bytearray(os.urandom(1 << 10) * 1024))


def _hold(lock: threading.Lock, seconds: float) -> None:
    while True:
        with lock:
            time.sleep(seconds)
        time.sleep(0.001)


@contextmanager
def _fork(body: Any) -> Iterator[int]:
    """Runs a function in a child until the end of the block."""
    pid = os.fork()
    if pid == 0:
        try:
            set_parent_death_signal(signal.SIGKILL)
            body()
        except BaseException as error:  # noqa: BLE001  # it must not run the parent's code
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _spin() -> None:
    while True:
        pass


@contextmanager
def _slow_disk(pid: int, bytes_a_second: int) -> Iterator[None]:
    """Limits what a process reads from disks, through the blkio controller."""
    folder = BLKIO / f"haiprof-{pid}"
    folder.mkdir()
    try:
        device = os.stat(tempfile.gettempdir()).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_a_second}"
        (folder / "blkio.throttle.read_bps_device").write_text(limit)
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(OSError):
            (BLKIO / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


def inject(stack: ExitStack, fault: Fault, lab: Lab, pids: list[int]) -> None:
    """Injects the faults that come from outside of the ranks."""
    victim = pids[fault.victim]
    if fault.kind == "cpu":
        for pid in pids:
            os.sched_setaffinity(pid, {1} if pid == victim else {0})
        for _ in range(fault.hogs):
            os.sched_setaffinity(stack.enter_context(_fork(_spin)), {1})
    if fault.kind == "disk":
        stack.enter_context(_slow_disk(victim, fault.disk_bytes_a_second))
    if fault.kind == "network":
        _slow_link(lab, fault.victim, fault.network_mbit)


def _slow_link(lab: Lab, host: int, mbit: int) -> None:
    """Shapes the link of one host in both directions: at the host, and at its port of the switch."""
    switch = lab._switch
    for where, device in ((lab.hosts[host].namespace, "eth0"), (switch, f"p{host}")):
        shape = ["tc", "-n", str(where), "qdisc", "add", "dev", device, "root", "tbf", "rate",
                 f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]  # fmt: skip
        subprocess.run(shape, check=True)


def run(fault: Fault, seconds: float) -> list[Finding]:
    """Returns the findings of one run."""
    with Lab(RANKS) as lab, tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for rank in range(RANKS):
            with open(folder / f"data{rank}", "wb") as file:
                file.write(os.urandom(64 * SAMPLE_BYTES))
                os.fsync(file.fileno())  # dirty pages would stay in memory
        pids = []
        for rank in range(RANKS):
            body = lambda rank=rank: train(rank, lab, fault, folder)  # noqa: E731
            pids.append(stack.enter_context(_fork(body)))
        until(lambda: all(is_prepared(pid) for pid in pids))
        inject(stack, fault, lab, pids)
        attached = collect(pids, Options(seconds=seconds, from_first_step=True, timeout_s=60))
        for one in attached:
            if one.session.failure:
                raise RuntimeError(one.session.failure)
        return explain([one.profile for one in attached])


def verdict(fault: Fault, findings: list[Finding]) -> str:
    """Returns "" if the first finding names the fault, else what was found instead."""
    wanted = EXPECTED[fault.kind]
    if not findings:
        return "no finding" if wanted else ""
    first = findings[0]
    right = first.kind == wanted and (fault.kind not in OF_A_RANK or first.rank == fault.victim)
    return "" if right else first.sentence


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of {', '.join(EXPECTED)}")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=6.0)
    asked = parser.parse_args()
    os.setpriority(os.PRIO_PROCESS, 0, -PRIORITY)
    wrong = 0
    for kind in asked.kinds or EXPECTED:
        good = 0
        for seed in range(asked.first, asked.first + asked.seeds):
            fault = Fault(kind, seed)
            found = run(fault, asked.seconds)
            failure = verdict(fault, found)
            good += not failure
            text = found[0].sentence if found else "no finding"
            print(f"{kind} {seed} victim {fault.victim}: {failure and 'WRONG '}{text}", flush=True)
        wrong += asked.seeds - good
        print(f"{kind}: {good} of {asked.seeds}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
