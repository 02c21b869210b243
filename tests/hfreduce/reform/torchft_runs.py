"""torchft's Manager over hfreduce; test_torchft.py runs this: torchft_runs.py [REPLICA LIGHTHOUSE]

Without arguments it starts a lighthouse and two replicas, kills one, starts another, and reads their lines.
"""

import datetime
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

import fireflyer.hfreduce as hfreduce

PATIENCE = datetime.timedelta(seconds=20)
LIMIT_S = 360.0


def train(name: str) -> None:
    """One replica of one rank; a line a step, until it is killed."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    torch.manual_seed(sum(name.encode()))  # others' weights come from who is there already
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    manager = Manager(
        pg=hfreduce.ProcessGroupHFReduce.alone(PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        replica_id=name,
        timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, sgd)
    data = torch.Generator().manual_seed(sum(name.encode()))
    while True:
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=data)).sum().backward()
        optimizer.step()
        weights = net.weight.detach().numpy().tobytes().hex()
        print(manager.current_step(), manager.num_participants(), weights, flush=True)


@dataclass
class Replica:
    """A process that trains; `steps` holds number of replicas and weights by step."""

    name: str
    lighthouse: str
    lines: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    steps: dict[int, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.name, self.lighthouse],
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def until(self, replicas: int, more: int) -> None:
        """Reads on until `more` steps in a row were made by so many replicas."""
        seen = 0
        while seen < more:
            line = self.lines.get(timeout=LIMIT_S)
            assert line, f"replica {self.name} ended with {self.process.wait()}"
            step, count, weights = line.split()
            self.steps[int(step)] = (int(count), weights)
            seen = seen + 1 if int(count) == replicas else 0


def main() -> None:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=500,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )
    address = lighthouse.address()
    first, second = Replica("first", address), Replica("second", address)
    third = None
    try:
        second.until(replicas=2, more=3)
        second.process.kill()
        first.until(replicas=2, more=1)
        first.until(replicas=1, more=3)
        third = Replica("third", address)
        third.until(replicas=2, more=3)
        first.until(replicas=2, more=3)
        common = first.steps.keys() & third.steps.keys()
        assert len(common) >= 2, (sorted(first.steps), sorted(third.steps))
        assert min(third.steps) > 3, "it began anew instead of healing"
        for step in common:
            assert first.steps[step] == third.steps[step], f"step {step} differs"
    finally:
        for replica in (first, second, third):
            if replica is not None:
                replica.process.kill()
                replica.process.wait()
        lighthouse.shutdown()
    print("torchft: ok", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        os.environ.update(TORCHFT_LIGHTHOUSE=sys.argv[2])
        train(sys.argv[1])
    else:
        main()
