"""Who trains in `bench train`. Another one is one entry of a table."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from fireflyer.bench.engine import Session
from fireflyer.bench.options import WIRES
from fireflyer.bench.train_models import Payload, Workload
from fireflyer.haiscale.ddp import DistributedDataParallel

LOCAL, TORCH_DDP = "local", "torch DDP"


@dataclass(frozen=True)
class Trainer:
    """One rank's part in a candidate's training.

    Attributes:
        step: forward, backward and optimizer; communication may go on.
        settle: none goes on when it returns.
    """

    step: Callable[[], object]
    settle: Callable[[], object]
    parameters: list[Tensor]


def averaged(payload: Payload) -> int:
    """Bytes that a step reduces to shards and gathers; each costs a host (H-1)/H of them."""
    return 2 * payload.whole


@dataclass(frozen=True)
class Candidate:
    """Goals are found in `goals` by its name.

    Attributes:
        peer: the candidate that it is compared with; None: it is a peer itself, or the work without peers.
        wire_bytes: of an element between hosts.
        moves: bytes of float32 that a step reduces to shards and gathers at least.
    """

    build: Callable[[Session, Workload], Trainer]
    peer: str | None = None
    wire_bytes: int = 4
    moves: Callable[[Payload], int] = averaged

    def least(self, payload: Payload, hosts: int) -> float:
        """Bytes that each host must send in a step."""
        return self.moves(payload) * (hosts - 1) / hosts * self.wire_bytes / 4


def _trainer(
    wrapped: nn.Module, work: Workload, optimizer: Optimizer, settle: Callable[[], object]
) -> Trainer:
    def step() -> None:
        optimizer.zero_grad()
        work.loss(wrapped).backward()
        optimizer.step()

    return Trainer(step, settle, list(work.module.parameters()))


def _nothing() -> None:
    """Everything is over when a step returns."""


def _local(_session: Session, work: Workload) -> Trainer:
    return _trainer(work.module, work, work.optimizer(work.module.parameters()), _nothing)


def _torch_ddp(session: Session, work: Workload) -> Trainer:
    model = TorchDDP(work.module, process_group=session.gloo, gradient_as_bucket_view=True)
    return _trainer(model, work, work.optimizer(work.module.parameters()), _nothing)


def _ours(crosses: bool, wire: str | None = None) -> Callable[[Session, Workload], Trainer]:
    def build(_session: Session, work: Workload) -> Trainer:
        optimizer = work.optimizer(work.module.parameters())
        given: Any = optimizer if crosses else None
        model = DistributedDataParallel(work.module, optimizer=given, wire=wire)
        return _trainer(model, work, optimizer, model.settle)

    return build


CANDIDATES = {
    LOCAL: Candidate(_local),
    TORCH_DDP: Candidate(_torch_ddp),
    "ddp, classic": Candidate(_ours(crosses=False), TORCH_DDP),
    "ddp": Candidate(_ours(crosses=True), TORCH_DDP),
    "ddp, bf16": Candidate(_ours(crosses=True, wire="bf16"), TORCH_DDP, WIRES["bf16"]),
    "ddp, int8": Candidate(_ours(crosses=True, wire="int8"), TORCH_DDP, WIRES["int8"]),
}


def digest(tensors: list[Tensor]) -> int:
    """A number that depends on every bit of the parameters."""
    total = 0
    for tensor in tensors:
        bits: Any = tensor.detach().contiguous().numpy()
        total = zlib.crc32(bits, total)
    return total
