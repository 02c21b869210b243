"""Tensors that lie over ranks: saved by any layout, loaded into any other, to the bit."""

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.draws import cases, drawn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    distribute_tensor,
)
from torch.distributed.tensor import Shard as ShardOn
from torch.distributed.tensor.placement_types import _StridedShard

from fireflyer.checkpoint import CheckpointManager, Shard
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.errors import CheckpointError, NoSpace

Differences = Callable[[Any, Any], list[str]]
Job = Callable[[int, Callable[[int], None]], None]
WORLDS = (1, 2, 3, 4)


def wholes() -> dict[str, torch.Tensor]:
    """What is saved: sizes that no world divides, one that is large, one that is empty."""
    generator = torch.Generator().manual_seed(5)
    return {
        "uneven": torch.randn(7, 5, generator=generator),
        "small": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "deep": torch.randint(0, 99, (3, 4, 2), generator=generator),
        "large": torch.randn(60, 37, generator=generator),
        "empty": torch.empty(0, 4),
    }


def meshes() -> dict[str, tuple[DeviceMesh, list[Placement]]]:
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else line
    wide = (lambda *both: (square, list(both))) if square is not line else None
    found: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "replicated": (line, [Replicate()]),
        "rows": (line, [ShardOn(0)]),
        "columns": (line, [ShardOn(1)]),
    }
    if wide is not None:
        found |= {
            "both": wide(ShardOn(0), ShardOn(1)),
            "hybrid": wide(Replicate(), ShardOn(1)),
            "rows twice": wide(ShardOn(0), ShardOn(0)),
            "fsdp of tp": wide(_StridedShard(0, split_factor=world // 2), ShardOn(0)),
        }
    return found


def laid_out(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def cut_unevenly(whole: torch.Tensor, rank: int, world: int) -> Shard:
    """The first rank has almost all rows, the last the rest, those between none."""
    rows = whole.shape[0]
    ends = [0, *([max(0, rows - 1)] * (world - 1)), rows]
    start, stop = ends[rank], ends[rank + 1]
    offsets = (start, *(0 for _ in whole.shape[1:]))
    return Shard(whole[start:stop].clone(), tuple(whole.shape), offsets)


def states(rank: int) -> dict[str, dict[str, Any]]:
    """A state for each layout."""
    world = dist.get_world_size()
    whole = wholes()
    found: dict[str, dict[str, Any]] = {
        name: {key: laid_out(one, *how) for key, one in whole.items()}
        for name, how in meshes().items()
    }
    found["plain"] = dict(whole)
    found["cut"] = {key: cut_unevenly(one, rank, world) for key, one in whole.items()}
    return found


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for leaf in state.values():
        local(leaf).zero_()
    return state


def local(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, Shard):
        return leaf.local if isinstance(leaf.local, torch.Tensor) else torch.from_numpy(leaf.local)
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def test_saved_by_any_layout_loaded_into_any_other(
    ram: Path, job: Job, differences: Differences, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (
        "save.data_file",
        "load.reader",
        "directory.manifest",
    ):  # so that small tensors have several blocks
        monkeypatch.setattr(f"fireflyer.checkpoint.{module}.CRC_BYTES", 1000)

    def save_all(rank: int) -> None:
        for name, state in states(rank).items():
            manager = CheckpointManager(ram / f"{dist.get_world_size()}-{name}")
            manager.save(1, {"t": state, "step": 1}).wait()

    def load_all(rank: int) -> None:
        wanted, targets = states(rank), states(rank)
        for place in chosen:
            manager = CheckpointManager(place)
            for name, into in targets.items():
                back = manager.load(into={"t": zeroed(into)})
                assert back["step"] == 1
                for key in into:
                    assert back["t"][key] is into[key]
                    found = differences(local(into[key]), local(wanted[name][key]))
                    assert found == [], (place, name, key)

    for world in WORLDS:
        job(world, save_all)
    places = sorted(path for path in ram.iterdir() if path.is_dir())
    assert len(places) == 5 + 9 + 5 + 9
    chosen = drawn("layouts").sample(places, max(6, cases(len(places))))
    for place in places:
        assert differences(CheckpointManager(place).load()["t"], wholes()) == [], place
        size = sum(path.stat().st_size for path in place.rglob("data-*"))
        exact = sum(one.nbytes for one in wholes().values())
        assert exact <= size <= exact + 64 * 4 * 8, "replicas are written once"
    for world in WORLDS:
        job(world, load_all)


def test_a_model_of_fsdp_goes_on_with_another_number_of_ranks(tmp_path: Path, job: Job) -> None:
    def start(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 5))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        torch.manual_seed(1)
        loss = model(torch.randn(4, 7)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def first(rank: int) -> None:
        model, optimizer = start(0)
        manager = CheckpointManager(tmp_path / "c", overlap=True)
        for _ in range(3):
            step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        manager.save(3, {"model": weights, "optimizer": moments})
        manager.before_step()
        (tmp_path / f"next-{rank}").write_text(
            json.dumps([step(model, optimizer) for _ in range(2)])
        )
        manager.wait()

    def second(rank: int) -> None:
        model, optimizer = start(5)
        weights, moments = get_state_dict(model, optimizer)
        into = {"model": weights, "optimizer": moments}
        CheckpointManager(tmp_path / "c").load(into=into, rest=False)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        losses = [step(model, optimizer) for _ in range(2)]
        assert losses == pytest.approx(json.loads((tmp_path / "next-0").read_text()))

    job(2, first)
    for world in (1, 3):
        job(world, second)


def test_stages_with_keys_of_their_own(tmp_path: Path, job: Job, differences: Differences) -> None:
    def stage(rank: int) -> dict[str, Any]:
        mine = {f"layer{rank}": {"w": torch.full((3,), float(rank)), "calls": rank}}
        return {"model": mine, "step": 7, "note": f"from {rank}", "shared": torch.arange(4)}

    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        manager.save(7, stage(rank), per_rank={"rank": rank}).wait()
        into = stage(rank)
        into["model"][f"layer{rank}"]["w"].zero_()
        mine = manager.load(into=into, rest=False)
        assert differences(mine, {**stage(rank), "note": "from 0"}) == []
        assert mine["shared"] is into["shared"]

    job(3, body)
    whole = CheckpointManager(tmp_path / "c").load()
    assert (
        differences(
            whole,
            {
                "model": {
                    f"layer{rank}": {"w": torch.full((3,), float(rank)), "calls": rank}
                    for rank in range(3)
                },
                "step": 7,
                "note": "from 0",
                "shared": torch.arange(4),
            },
        )
        == []
    )


def test_some_tensors_by_name(tmp_path: Path, job: Job, differences: Differences) -> None:
    def body(rank: int) -> None:
        whole = wholes()
        state = {"a": cut_unevenly(whole["uneven"], rank, 2), "b": [whole["deep"], whole["small"]]}
        manager = CheckpointManager(tmp_path / "c")
        manager.save(3, {"m": state}).wait()

    job(2, body)
    manager = CheckpointManager(tmp_path / "c")
    [data] = (tmp_path / "c").rglob("data-*-00001.bin")
    data.write_bytes(bytes(data.stat().st_size))
    assert (
        differences(
            manager.load_tensors("m.b*"), {"m.b[0]": wholes()["deep"], "m.b[1]": wholes()["small"]}
        )
        == []
    ), "what is not asked for is not read"
    assert list(manager.load_tensors(["m.b[1]"], step=3)) == ["m.b[1]"]
    with pytest.raises(CheckpointError, match="no tensor of step 3 matches x, y"):
        manager.load_tensors(["x", "y"])
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        manager.load_tensors("m.*")
    assert not (tmp_path / "c" / "damaged").exists()


def test_what_ranks_cannot_save_together_fails_on_all(tmp_path: Path, job: Job) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(
            CheckpointError, match="cannot save p: it is a DTensor with the placement P"
        ):
            manager.save(1, {"p": part})
        with pytest.raises(CheckpointError, match=r"cannot save w: .*\[2\] on rank 0.*\[3\]"):
            manager.save(1, {"w": torch.ones(2 + rank)})
        with pytest.raises(CheckpointError, match=r"cannot save w: .*overlap"):
            manager.save(1, {"w": Shard(torch.ones(3), (5,), (2 * rank,))})
        with pytest.raises(CheckpointError, match="cannot save w of per_rank: it is a shard"):
            manager.save(1, {}, per_rank={"w": Shard(torch.ones(3), (5,), (2 * rank,))})
        with pytest.raises(CheckpointError, match="same step: 1 on rank 0, 2 on rank 1"):
            manager.save(1 + rank, {})
        with pytest.raises(ValueError if rank == 1 else CheckpointError, match="step -1 is below"):
            manager.save(-rank, {})
        manager.save(3, {"ok": torch.ones(2)}).wait()
        assert manager.steps() == [3]

    job(2, body)


def test_a_rank_without_memory_fails_the_save_on_all(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        reserve = manager._stager.reserve

        def refuse(size: int) -> None:
            raise NoSpace("no memory on rank 1")

        if rank == 1:
            monkeypatch.setattr(manager._stager, "reserve", refuse)
        for _ in range(2):
            with pytest.raises(
                NoSpace if rank == 1 else CheckpointError, match="no memory on rank"
            ):
                manager.save(1, {"w": torch.ones(2)})
        monkeypatch.setattr(manager._stager, "reserve", reserve)
        manager.save(2, {"w": torch.ones(2)}).wait()
        manager.save(3, {"w": torch.ones(2)}).wait()
        assert manager.steps() == [2, 3]

    job(2, body)


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_in_any_block_of_a_large_tensor_is_found(tmp_path: Path, damage: str) -> None:
    manager = CheckpointManager(tmp_path)
    old, new = torch.zeros(4, 700_001), torch.randn(4, 700_001)
    manager.save(1, {"w": old}).wait()
    manager.save(2, {"w": new}).wait()
    [data] = (tmp_path / "step-000000000002").glob("data-*")
    size = data.stat().st_size
    assert size > 10 << 20
    into = Shard(torch.ones(4, 10), (4, 700_001), (0, 500_000))
    assert torch.equal(manager.load(into={"w": into})["w"].local, new[:, 500_000:500_010])
    if damage == "truncated":
        os.truncate(data, size - 1)
    else:
        with data.open("r+b") as file:
            at = (2 * 700_001 + 500_003) * 4
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), at)
    assert torch.equal(manager.load(into={"w": into})["w"].local, old[:, 500_000:500_010])
    assert manager.steps() == [1]


def test_a_manifest_whose_pieces_leave_a_hole_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)

    def shrink(box: Box, *_: object) -> Box:
        return Box(box.offsets, (1, *box.shape[1:]))

    from fireflyer.checkpoint.save import prepare

    with monkeypatch.context() as patch:
        real = prepare.Preparer._lay_out

        def lay_out(self: Any, *args: Any) -> None:
            real(self, *args)
            self._boxes = [shrink(box) for box in self._boxes]

        patch.setattr(prepare.Preparer, "_lay_out", lay_out)
        manager.save(1, {"w": torch.ones(3, 2)}).wait()
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        manager.load()
    assert "pieces of w do not form a tensor: 4 elements" in caplog.text


def peak_above(body: Callable[[], object]) -> int:
    """Bytes of memory that `body` needs beyond what is there."""

    def status(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    body()
    return status("VmHWM") - before


@pytest.mark.full
def test_load_needs_little_memory_beyond_the_targets(
    tmp_path: Path, forked: Callable[..., list[int]]
) -> None:
    shape = (4096, 16384)  # 256 MiB

    def save() -> None:
        CheckpointManager(tmp_path).save(1, {"w": torch.ones(shape), "n": np.ones(3)}).wait()

    def load() -> None:
        left = Shard(torch.zeros(4096, 9000), shape, (0, 0))
        whole = torch.zeros(16384, 4096).t()
        manager = CheckpointManager(tmp_path)
        for into in (left, whole):
            fill = functools.partial(manager.load, into={"w": into}, rest=False)
            assert peak_above(fill) < 64 << 20
        assert left.local.min() == 1
        assert whole.min() == 1

    assert forked(save) == [0]
    assert forked(load) == [0]


def test_without_the_rest_every_key_must_be_there(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(2), "n": 1}).wait()
    given = {"w": torch.zeros(2), "n": 0, "more": {"m": 0}}
    with pytest.raises(CheckpointError, match="has no more"):
        manager.load(into=given, rest=False)
    assert "more" not in manager.load(into=given)
    assert manager.load(into={"n": 0}, rest=False) == {"n": 1}
