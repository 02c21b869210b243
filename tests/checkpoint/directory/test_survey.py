"""What a directory holds, damage found to the byte, statistics, differences; pruning beside a run."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.compare import Statistics, differences, statistics
from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.directory.survey import Verifier, bytes_to_verify, summaries
from fireflyer.checkpoint.state.contents import InMemory
from fireflyer.storage import Storage, open_storage

MIB = 1 << 20


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(9 * MIB // 4, generator=generator),
        "small": torch.arange(10),
        "n": np.arange(3),
        "step": seed,
    }


def saved(directory: Path, steps: int = 2) -> Catalog:
    manager = CheckpointManager(directory, incremental=True)
    for step in range(1, steps + 1):
        kept = state() | {"step": step, "small": torch.arange(10) + step}
        manager.save(step, kept, per_rank={"rng": torch.ones(4)}, metrics={"loss": 1 / step}).wait()
    return Catalog(open_storage(directory))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_summaries(tmp_path: Path) -> None:
    catalog = saved(tmp_path, 3)
    found = summaries(catalog)
    assert [(one.step, one.state, one.number) for one in found] == [
        (3, "whole", 3), (2, "whole", 2), (1, "whole", 1)
    ]  # fmt: skip
    newest, oldest = found[0], found[-1]
    assert (newest.tensors, newest.values, newest.world_size) == (3, 1, 1)
    assert newest.metrics == {"loss": 1 / 3}
    assert oldest.bytes == newest.bytes == 9 * MIB + 80 + 24 + 16
    assert oldest.older_bytes == 0
    assert newest.older_bytes == newest.bytes - 80
    next(tmp_path.glob("step-*3/data*")).unlink()
    flip(next(tmp_path.glob("step-*2/manifest*")), 30)
    path = next(tmp_path.glob("step-*1/manifest*"))
    assert [one.state for one in summaries(catalog)] == ["damaged", "damaged", "whole"]
    assert "is missing" in summaries(catalog)[0].reason
    catalog.set_aside(Generation(1, 3, 3))
    assert [(one.step, one.state) for one in summaries(catalog)] == [
        (2, "damaged"), (1, "whole"), (3, "set aside")
    ]  # fmt: skip
    assert path.exists()


def test_a_later_version_is_no_damage(tmp_path: Path) -> None:
    from fireflyer._native import crc32

    catalog = saved(tmp_path, 1)
    path = next(tmp_path.glob("step-*/manifest*"))
    body = json.dumps(json.loads(path.read_bytes())["body"] | {"version": 3}).encode()
    path.write_bytes(b'{"crc32":%d,"body":%s}' % (crc32(body), body))
    assert [one.state for one in summaries(catalog)] == ["unknown version"]


def test_all_damages_are_found_and_named(tmp_path: Path) -> None:
    catalog = saved(tmp_path)
    first, second = (next(tmp_path.glob(f"step-*{step}/data*")) for step in (1, 2))
    generations = catalog.generations()
    whole = Verifier(catalog)
    assert [whole.verify(one) for one in generations] == [[], []]
    # What is shared is read once.
    assert whole.found.bytes == bytes_to_verify(catalog, generations) == 9 * MIB + 2 * 80 + 24 + 16
    flip(first, 10)
    flip(first, 8 * MIB + 10)
    flip(second, 79)
    verifier = Verifier(catalog)
    found = {one.step: (verifier.verify(one) or []) for one in generations}
    assert {one.tensors[0] for one in found[2]} == {"large", "small"}
    assert [one.tensors for one in found[1]] == [["large"], ["large"]]
    assert all("CRC32" in one.message for one in verifier.found.damages)
    assert len(verifier.found.damages) == 5
    assert verifier.found.bytes == whole.found.bytes


def test_lost_files_and_manifests(tmp_path: Path) -> None:
    catalog = saved(tmp_path)
    first, second = (next(tmp_path.glob(f"step-*{step}/data*")) for step in (1, 2))
    second.write_bytes(second.read_bytes()[:-1])
    flip(next(tmp_path.glob("step-*1/manifest*")), 40)
    verifier = Verifier(catalog)
    newest, oldest = ((verifier.verify(one) or []) for one in catalog.generations())
    assert [(one.file, one.tensors) for one in newest] == [
        (str(second.relative_to(tmp_path)), ["small"])
    ]
    assert [one.file for one in oldest] == ["step-000000000001/manifest-000001-000001.json"]
    first.unlink()
    names = next(
        one.tensors
        for one in (verifier.verify(Generation(1, 2, 2)) or [])
        if "missing" in one.message
    )
    assert names == ["large", "n", "per_rank[0] rng"]


def numbers_of(leaf: Any) -> Statistics | None:
    contents = InMemory({"t": leaf})
    return statistics(contents, contents.tensors[0])


def test_statistics() -> None:
    values = torch.randn(3 * MIB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = numbers_of(values)
    assert found is not None
    assert found.count == len(values)
    assert found.mean == pytest.approx(float(values.mean()), rel=1e-9)
    assert found.std == pytest.approx(float(values.std(correction=0)), rel=1e-9)
    assert (found.min, found.max) == (float(values.min()), float(values.max()))
    assert sum(found.histogram) == len(values)
    assert found.histogram == [int(n) for n in np.histogram(values.numpy(), 20)[0]]


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (torch.tensor([1.0, -3.0, math.nan, math.inf, 0.0]), (5, 1, 1, 1, -3.0, 1.0)),
        (torch.tensor([448.0, -1.0]).to(torch.float8_e4m3fn), (2, 0, 0, 0, -1.0, 448.0)),
        (torch.tensor([True, False, True]), (3, 0, 0, 1, 0.0, 1.0)),
        (torch.tensor([3 + 4j]), (1, 0, 0, 0, 5.0, 5.0)),
        (torch.tensor([2**63], dtype=torch.uint64), (1, 0, 0, 0, 2.0**63, 2.0**63)),
        (torch.tensor([1e308, -1e308], dtype=torch.float64), (2, 0, 0, 0, -1e308, 1e308)),
        (np.array([1, -2], ">i2"), (2, 0, 0, 0, -2.0, 1.0)),
        (torch.empty(0), (0, 0, 0, 0, None, None)),
        (torch.tensor([math.nan]), (1, 1, 0, 0, None, None)),
    ],
)
def test_statistics_of_kinds(leaf: Any, expected: tuple[Any, ...]) -> None:
    found = numbers_of(leaf)
    assert found is not None
    assert (
        found.count,
        found.nans,
        found.infinities,
        found.zeros,
        found.min,
        found.max,
    ) == expected
    assert sum(found.histogram) == found.count - found.nans - found.infinities


def test_text_has_no_statistics() -> None:
    assert numbers_of(np.array(["a", "bc"])) is None


def changes(before: Any, after: Any) -> dict[str, Any]:
    return {one.name: one for one in differences(InMemory(before), InMemory(after))}


def test_differences() -> None:
    before = {
        "same": torch.tensor([1.0, math.nan]), "moved": torch.tensor([3.0, 4.0]),
        "shape": torch.ones(2), "dtype": torch.ones(2), "kind": torch.ones(2), "gone": torch.ones(1),
        "nan": torch.tensor([1.0, 2.0]), "text": np.array(["a"]), "zero": torch.zeros(2),
        "v": {"int": 1, "float": 1.0, "one": 1, "kept": "x", "cut": 3}, "list": [1, 2],
    }  # fmt: skip
    after = {
        "same": torch.tensor([1.0, math.nan]), "moved": torch.tensor([3.0, 4.5]),
        "shape": torch.ones(3), "dtype": torch.ones(2).half(), "kind": np.ones(2, np.float32),
        "nan": torch.tensor([1.0, math.nan]), "text": np.array(["b"]), "zero": -torch.zeros(2),
        "v": {"int": 2, "float": 1, "one": True, "kept": "x"}, "list": (1, 2), "new": b"\1",
    }  # fmt: skip
    found = changes(before, after)
    assert "same" not in found
    assert "v.kept" not in found
    assert found["moved"].max_difference == 0.5
    assert found["moved"].relative == pytest.approx(0.1)
    assert (found["nan"].max_difference, found["nan"].relative) == (math.inf, None)
    assert (found["zero"].max_difference, found["zero"].relative) == (0.0, None)
    assert (found["text"].kind, found["text"].max_difference) == ("changed", None)
    assert (found["shape"].before, found["shape"].after) == ("float32 [2]", "float32 [3]")
    assert (found["dtype"].after, found["kind"].after) == ("float16 [2]", "numpy <f4 [2]")
    assert (found["v.int"].before, found["v.int"].after) == ("1", "2")
    assert {"v.float", "v.one", "list"} <= found.keys()
    assert {name: one.kind for name, one in found.items() if one.kind != "changed"} == {
        "gone": "removed", "v.cut": "removed", "new": "added"
    }  # fmt: skip


def test_differences_over_blocks_and_pieces(tmp_path: Path) -> None:
    big = torch.arange(3 * MIB, dtype=torch.float32)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": big}).wait()
    other = big.clone()
    other[2 * MIB + 5] += 2
    manager.save(2, {"w": other}).wait()
    catalog = Catalog(open_storage(tmp_path))
    one, two = Snapshot.open(catalog, 1), Snapshot.open(catalog, 2)
    assert [change.max_difference for change in differences(one, two)] == [2.0]
    assert differences(two, two) == []


def test_pruning_beside_a_run_that_saves(
    tmp_path: Path, told: Callable[[Storage, Callable[[str, str], None]], Storage]
) -> None:
    """While the pruning reads what is needed, the run saves, naming an old file, and retires another."""
    manager = CheckpointManager(tmp_path, incremental=True)
    for step in (1, 2):
        manager.save(step, state() | {"step": step}).wait()
    plain = Catalog(open_storage(tmp_path))
    first, second = Generation(1, 1, 1), Generation(1, 2, 2)
    meanwhile = [second.manifest]

    def before(call: str, name: str) -> None:
        if call == "read" and name in meanwhile:
            meanwhile.clear()
            manager.save(3, state() | {"step": 3}).wait()
            plain.delete([second])

    Catalog(told(open_storage(tmp_path), before)).delete([first])
    assert meanwhile == []
    assert [one.step for one in plain.generations()] == [3]
    assert Verifier(plain).verify(Generation(1, 3, 3)) == []
    assert manager.load()["step"] == 3


def test_what_a_run_retires_meanwhile_is_no_damage(tmp_path: Path) -> None:
    catalog = saved(tmp_path, 3)
    chosen = catalog.generations()

    class Beside(Verifier):
        """Another process removes the oldest just when it is looked at."""

        def _damages(self, generation: Generation) -> Any:
            if generation == chosen[-1]:
                next(tmp_path.glob("step-000000000001/manifest*")).unlink()
            return super()._damages(generation)

    verifier = Beside(catalog)
    assert [verifier.verify(generation) for generation in chosen] == [[], [], None]
    assert verifier.found.checkpoints == 2
    assert verifier.found.damages == []


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    catalog = saved(tmp_path, 3)
    manifest = next(tmp_path.glob("step-*3/manifest*"))
    manifest.unlink()
    manifest.mkdir()
    data = next(tmp_path.glob("step-*2/data*"))
    data.unlink()
    data.symlink_to(data)
    assert [one.state for one in summaries(catalog)] == ["unreadable", "unreadable", "whole"]
    verifier = Verifier(catalog)
    found = [verifier.verify(generation) for generation in catalog.generations()]
    assert [bool(damages) for damages in found] == [True, True, False]
