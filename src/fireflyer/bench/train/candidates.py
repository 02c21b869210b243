"""Candidates of `bench train`. A new candidate needs one more entry in a table."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from fireflyer.bench.harness.options import WIRES
from fireflyer.bench.harness.ranks import Session
from fireflyer.bench.train.models import Payload, Workload
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh

LOCAL, TORCH_DDP = "local", "torch DDP"
FSDP2, FSDP2_ZERO_2, FSDP2_HSDP = "FSDP2 ZeRO-3", "FSDP2 ZeRO-2", "FSDP2 HSDP"


@dataclass(frozen=True)
class Trainer:
    """One rank's part of a candidate's training.

    Attributes:
        step: function that runs forward, backward and optimizer; communication may continue
            afterwards.
        settle: function that returns when no communication is in flight.
        parameters: function that returns all parameters in full; collective for a sharded model.
    """

    step: Callable[[], object]
    settle: Callable[[], object]
    parameters: Callable[[], Iterable[Tensor]]


def averaged(payload: Payload) -> int:
    """Returns the bytes that a step reduce-scatters and all-gathers.

    Each of H hosts sends (H-1)/H of them.
    """
    return 2 * payload.whole


def gathered_twice(payload: Payload) -> int:
    """Returns the bytes that a ZeRO-3 step reduce-scatters and all-gathers.

    The step gathers all parameters for forward and reduces all gradients. For backward it gathers
    all parameters again, except those of the outermost unit.
    """
    return 3 * payload.whole - payload.root


@dataclass(frozen=True)
class Candidate:
    """Kind of training to measure; harness/goals.py has its goals under its key in CANDIDATES.

    Attributes:
        family: name from `options.TRAIN_FAMILIES`; "" for LOCAL, the work without communication,
            which belongs to all families.
        peer: candidate to compare with; None for LOCAL and for candidates that are peers.
        hybrid: True if it shards inside a host and replicates between hosts, which needs several
            ranks per host.
        wire_bytes: bytes per element between hosts.
        moves: function that returns the minimum float32 bytes that a step reduce-scatters and
            all-gathers.
    """

    build: Callable[[Session, Workload], Trainer]
    family: str
    peer: str | None = None
    wire_bytes: int = 4
    moves: Callable[[Payload], int] = averaged
    hybrid: bool = False

    def least(self, payload: Payload, hosts: int) -> float:
        """Returns the bytes that each host must send in a step."""
        return self.moves(payload) * (hosts - 1) / hosts * self.wire_bytes / 4


def _trainer(
    wrapped: nn.Module, work: Workload, optimizer: Optimizer, settle: Callable[[], object]
) -> Trainer:
    def step() -> None:
        optimizer.zero_grad()
        work.loss(wrapped).backward()
        optimizer.step()

    return Trainer(step, settle, lambda: map(_whole, work.module.parameters()))


def _whole(parameter: Any) -> Tensor:
    gathers = getattr(parameter, "full_tensor", None)
    whole: Tensor = parameter if gathers is None else gathers()
    return whole


def _nothing() -> None:
    """Does nothing: no communication is in flight after the candidate's step."""


def _local(_session: Session, work: Workload) -> Trainer:
    return _trainer(work.module, work, work.optimizer(work.module.parameters()), _nothing)


def _torch_ddp(session: Session, work: Workload) -> Trainer:
    model = TorchDDP(work.module, process_group=session.gloo, gradient_as_bucket_view=True)
    return _trainer(model, work, work.optimizer(work.module.parameters()), _nothing)


def _ours(deferred: bool, wire: str | None = None) -> Callable[[Session, Workload], Trainer]:
    def build(_session: Session, work: Workload) -> Trainer:
        optimizer = work.optimizer(work.module.parameters())
        given: Any = optimizer if deferred else None
        model = DistributedDataParallel(work.module, optimizer=given, wire=wire)
        return _trainer(model, work, optimizer, model.settle)

    return build


def _torch_fsdp(reshard: bool | None, hybrid: bool = False) -> Callable[..., Trainer]:
    """Returns the build function of an FSDP2 candidate.

    Args:
        reshard: None means the default of `fully_shard`: all except the outermost unit.
    """

    def build(session: Session, work: Workload) -> Trainer:
        mesh = _gloo_rows() if hybrid else DeviceMesh.from_group(session.gloo, "cpu")
        for part in (*work.units, work.module):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        return _trainer(work.module, work, work.optimizer(work.module.parameters()), _nothing)

    return build


def _gloo_rows() -> DeviceMesh:
    """Returns a mesh of gloo groups with one row of ranks per host."""
    world: Any = dist.group.WORLD
    rows = torch.tensor(world.hosts)
    mine: list[Any] = []
    for lines in (rows.T.tolist(), rows.tolist()):
        groups = {tuple(line): dist.new_group(line, backend="gloo") for line in lines}
        mine += [group for line, group in groups.items() if dist.get_rank() in line]
    return DeviceMesh.from_group(mine, "cpu", mesh=rows, mesh_dim_names=("replicate", "shard"))


def _our_fsdp(
    deferred: bool = True, hybrid: bool = False, **options: Any
) -> Callable[..., Trainer]:
    def build(_session: Session, work: Workload) -> Trainer:
        units = set(work.units)
        model = FullyShardedDataParallel(
            work.module,
            optimizer=work.optimizer if deferred else None,
            auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
            mesh=hybrid_mesh() if hybrid else None,
            **options,
        )
        optimizer = model.optimizer or work.optimizer(model.parameters())
        return _trainer(model, work, optimizer, model.settle)

    return build


_BF16_BOTH_WAYS: dict[str, Any] = {"gather_dtype": torch.bfloat16, "wire": "bf16"}
_DDP, _FSDP = partial(Candidate, family="ddp"), partial(Candidate, family="fsdp")

CANDIDATES: dict[str, Candidate] = {
    LOCAL: Candidate(_local, family=""),
    TORCH_DDP: _DDP(_torch_ddp),
    "ddp, synchronous": _DDP(_ours(deferred=False), peer=TORCH_DDP),
    "ddp": _DDP(_ours(deferred=True), peer=TORCH_DDP),
    "ddp, bf16": _DDP(_ours(deferred=True, wire="bf16"), peer=TORCH_DDP, wire_bytes=WIRES["bf16"]),
    "ddp, int8": _DDP(_ours(deferred=True, wire="int8"), peer=TORCH_DDP, wire_bytes=WIRES["int8"]),
    FSDP2: _FSDP(_torch_fsdp(reshard=None), moves=gathered_twice),
    FSDP2_ZERO_2: _FSDP(_torch_fsdp(reshard=False)),
    FSDP2_HSDP: _FSDP(_torch_fsdp(reshard=None, hybrid=True), hybrid=True),
    "ZeRO-3, synchronous": _FSDP(_our_fsdp(deferred=False), peer=FSDP2, moves=gathered_twice),
    "ZeRO-3": _FSDP(_our_fsdp(), peer=FSDP2, moves=gathered_twice),
    "ZeRO-2, synchronous": _FSDP(
        _our_fsdp(deferred=False, reshard_after_forward=False), peer=FSDP2_ZERO_2
    ),
    "ZeRO-2": _FSDP(_our_fsdp(reshard_after_forward=False), peer=FSDP2_ZERO_2),
    "ZeRO-3, bf16 both ways": _FSDP(
        _our_fsdp(**_BF16_BOTH_WAYS),
        peer=FSDP2,
        wire_bytes=WIRES["bf16"],
        moves=gathered_twice,
    ),
    "HSDP": _FSDP(_our_fsdp(hybrid=True), peer=FSDP2_HSDP, hybrid=True),
}


def candidates(families: Iterable[str], ranks_per_host: int) -> list[str]:
    """Returns the names of the candidates that can run on several hosts."""
    wanted = {"", *families}
    return [
        name
        for name, candidate in CANDIDATES.items()
        if candidate.family in wanted and (ranks_per_host > 1 or not candidate.hybrid)
    ]


def digest(tensors: Iterable[Tensor]) -> int:
    """Returns a number that depends on every bit of the parameters."""
    total = 0
    for tensor in tensors:
        bits: Any = tensor.detach().contiguous().numpy()
        total = zlib.crc32(bits, total)
    return total
