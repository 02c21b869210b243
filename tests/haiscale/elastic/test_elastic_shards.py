"""Sharded models that lose ranks and gain them: training is that of one process with the same batches."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.elastic.elastic_job import STEPS, Job, check, die_at, init, join
from tests.waiting import until
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import ConfigError, ShardsLost
from fireflyer.haiscale.elastic.training import Elastic
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")


class Sharded(Job):
    """The job with its model in shards."""

    def wrap(self, **options: Any) -> Elastic:
        self.model = FullyShardedDataParallel(
            self.core,
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            elastic=True,
            redivide=self.loader.redivide,
            **options,
        )
        self.optimizer = self.model.optimizer
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6], gamma=0.5)
        elastic: Elastic = self.model.elastic
        elastic.carry(self.loader, self.scheduler)
        self.core[0].register_forward_hook(lambda *_: self.act("forward"))
        self.core[2].register_full_backward_hook(lambda *_: self.act("backward"))
        return elastic

    def result(self) -> dict[str, Any]:
        states: Any = get_state_dict(self.core, self.optimizer)
        weights, moments = states
        whole = {
            name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in weights.items()
        }
        rows = [row for _, row in sorted(moments["state"].items())]
        return {
            "steps": self.model.elastic.steps,
            "world": dist.get_world_size(),
            "rank": dist.get_rank(),
            "loader": self.loader.state_dict(),
            "division": (self.loader.rank, self.loader.world),
            "scheduler": dict(self.scheduler.state_dict()),
            "forwards": int(whole["1.calls"]),
            "bytes": [t.numpy().tobytes() for t in whole.values()],
            "moments": [
                (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy().tobytes()
                for row in rows
                for t in row.values()
            ],
            "parameters": [whole[n].numpy() for n, _ in self.core.named_parameters()],
        }


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(("point", "zero"), [("forward", 3), ("backward", 3), ("backward", 2)])
def test_a_lost_host_whose_shards_have_replicas(
    start_gang: Start, store_path: str, point: str, zero: int
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Sharded(rank, rank, world)
        job.wrap(mesh=hybrid_mesh, reshard_after_forward=zero == 3)
        if rank > 1:
            die_at(job, 4, point)
        job.train()
        return job.result()

    results = start_gang(body, 4, nodes=2).results()
    assert results[2:] == [None, None]
    check(results[:2], 2)


def test_a_newcomer_gets_its_shards(start_gang: Start, store_path: str, tmp_path: Path) -> None:
    members = tmp_path / "members"

    def body(rank: int, world: int) -> Any:
        group = init(store_path, rank, 3) if rank < 3 else join(members)
        job = Sharded(rank, dist.get_rank(), dist.get_world_size())
        elastic = job.wrap(members_file=members)

        def wait(point: str) -> None:
            if point == "forward" and elastic.steps == 3 and group.size() == 3:
                until(lambda: group.newcomers_wait or dist.get_rank() != 0)

        if rank < 3:
            job.act = wait
        job.train()
        return job.result()

    check(start_gang(body, 4).results(), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("restores", [True, False])
def test_lost_shards_without_replicas(
    start_gang: Start, store_path: str, tmp_path: Path, restores: bool
) -> None:
    """They come from the newest checkpoint, two steps back; without `restore` the error says what is lost."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Sharded(rank, rank, world)
        elastic = job.wrap()
        ckpt = CheckpointManager(tmp_path / "c")
        elastic.fenced.append(ckpt.fence)

        def state() -> dict[str, Any]:
            tensors = get_state_dict(job.core, job.optimizer)
            scheduler = job.scheduler.state_dict()
            del scheduler["milestones"]
            plain = {"loader": job.loader.state_dict(), "scheduler": scheduler}
            return {"step": elastic.steps, "tensors": tensors, **plain}

        def restore() -> int:
            found = ckpt.load(into=state())
            weights, moments = found["tensors"]
            set_state_dict(
                job.core, job.optimizer, model_state_dict=weights, optim_state_dict=moments
            )
            job.loader.load_state_dict(found["loader"])
            job.scheduler.load_state_dict(found["scheduler"])
            return int(found["step"])

        if restores:
            elastic.restore = restore
        if rank == 3:
            die_at(job, 5, "backward")
        act, job.act = job.act, lambda point: None

        def saving(point: str) -> None:
            if point == "between steps" and elastic.steps == 3 and world == dist.get_world_size():
                ckpt.save(3, state()).wait()
            act(point)

        job.act = saving
        if not restores:
            with pytest.raises(ShardsLost, match="3"):
                job.train()
            return None
        job.train()
        return job.result()

    results = start_gang(body, 4).results()
    if restores:
        check(results[:3], 3)
    assert results[3] is None


def test_wrong_use(start_gang: Start, store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Sharded(rank, rank, world)
        with pytest.raises(ConfigError, match="needs the optimizer"):
            FullyShardedDataParallel(job.core, elastic=True)
        with pytest.raises(ConfigError, match="need elastic=True"):
            FullyShardedDataParallel(job.core, redivide=job.loader.redivide)
        return STEPS

    assert start_gang(body, 1).results() == [STEPS]
