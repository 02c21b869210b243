"""Manifests that lie under a right CRC: load goes back to an older checkpoint, and nothing else is raised."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests import draws
from tests.checkpoint.conftest import SOAK

from fireflyer._native import crc32
from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.directory.survey import Verifier, summaries
from fireflyer.errors import CheckpointError, StorageError
from fireflyer.storage import DirectoryStorage

Differences = Callable[[Any, Any], list[str]]
Body = dict[str, Any]
LIES = 20_000 if SOAK else draws.cases(800)


def state_of(step: int) -> dict[str, Any]:
    return {
        "w": torch.arange(6.0).reshape(2, 3) * step,
        "list": [torch.full((5,), step), (1 << 70, 1.5, float("nan"), True, None, b"xy"), {}],
        "a": {7: np.arange(4, dtype="<i2"), "text": "x", "empty": torch.empty(0, 3)},
        "step": step,
    }


@pytest.fixture(scope="module")
def good(ram_root: Path) -> Path:
    """Two checkpoints."""
    place = ram_root / "manifests"
    manager = CheckpointManager(place)
    for step in (1, 2):
        own = {"rng": torch.arange(3), "n": step}
        manager.save(step, state_of(step), per_rank=own, metrics={"loss": 0.5}).wait()
    return place


@pytest.fixture
def place(good: Path, ram: Path) -> Path:
    return Path(shutil.copytree(good, ram / "place"))


def manifest_of(place: Path) -> Path:
    return next(place.glob("step-*2/manifest-*"))


def body_of(place: Path) -> Body:
    return json.loads(manifest_of(place).read_bytes())["body"]  # type: ignore[no-any-return]


def lie(place: Path, body: Body) -> None:
    text = msgspec.json.encode(body)
    manifest_of(place).write_bytes(b'{"crc32":%d,"body":%s}' % (crc32(text), text))


def node(body: Body, *path: str | int) -> dict[str, Any]:
    return next(node for node in body["state"] if tuple(node["path"]) == path)


def piece(body: Body) -> dict[str, Any]:
    return node(body, "w")["pieces"][0]  # type: ignore[no-any-return]


def shared(body: Body) -> None:
    """A tensor a hundred times as large, made of the same bytes again and again."""
    tensor, first = node(body, "w"), piece(body)
    tensor["shape"] = [200, 3]
    tensor["pieces"] = [{**first, "offsets": [row, 0]} for row in range(0, 200, 2)]


STRUCTURE: dict[str, Callable[[Body], Any]] = {
    "no root": lambda b: b["state"].pop(0),
    "no nodes": lambda b: b["state"].clear(),
    "a root twice": lambda b: b["state"].insert(1, b["state"][0]),
    "a node twice": lambda b: b["state"].append(node(b, "step")),
    "a leaf twice, of two kinds": lambda b: b["state"].append({**node(b, "w"), "path": ["step"]}),
    "a child before its parent": lambda b: b["state"].reverse(),
    "a missing parent": lambda b: b["state"].remove(node(b, "list", 2)) or node(b, "a").update(path=["b"]),
    "a parent of itself": lambda b: node(b, "a").update(path=["a", "a"]),
    "a tensor with a child": lambda b: node(b, "step").update(path=["w", "step"]),
    "a value with a child": lambda b: b["state"].append({**node(b, "a", "text"), "path": ["step", "x"]}),
    "a list with a hole": lambda b: node(b, "list", 2).update(path=["list", 3]),
    "a list with a name": lambda b: node(b, "list", 2).update(path=["list", "2"]),
    "a list as a leaf": lambda b: node(b, "list").update(node="value", kind="int", value=1),
    "no end of depth": lambda b: b["state"].extend(
        {"node": "container", "path": ["deep"] * n, "kind": "dict"} for n in range(1, 300)
    ),
    "per_rank without a root": lambda b: b["per_rank"]["0"].pop(0),
    "per_rank without nodes": lambda b: b["per_rank"].update({"0": []}),
    "a fraction in a path": lambda b: node(b, "step").update(path=[1.5]),
    "a text that is a number": lambda b: node(b, "a", "text").update(value=7),
    "a number that is a text": lambda b: node(b, "step").update(value="7z"),
    "a number that is a truth": lambda b: node(b, "step").update(value=True),
    "a truth that is a number": lambda b: node(b, "list", 1, 3).update(value=1),
    "a fraction that is a word": lambda b: node(b, "list", 1, 1).update(value="one"),
    "bytes that are none": lambda b: node(b, "list", 1, 5).update(value="\u00e9=="),
    "none that is something": lambda b: node(b, "list", 1, 4).update(value=0),
    "an unknown kind of node": lambda b: node(b, "step").update(node="link"),
    "an unknown kind of tensor": lambda b: node(b, "w").update(kind="jax"),
    "objects": lambda b: node(b, "a", 7).update(dtype="|O"),
    "fields": lambda b: node(b, "a", 7).update(dtype="<i2,<i2"),
    "no dtype": lambda b: node(b, "w").update(dtype="load"),
    "a quantised dtype": lambda b: node(b, "w").update(dtype="qint32"),
    "another dtype": lambda b: node(b, "w").update(dtype="float64"),
    "a larger shape": lambda b: node(b, "w").update(shape=[2, 4]),
    "a negative shape": lambda b: node(b, "w").update(shape=[2, -3]),
    "an absurd shape": lambda b: node(b, "w").update(shape=[2**62, 2**62]),
    "an absurd shape of nothing": lambda b: node(b, "a", "empty").update(shape=[0, 2**62, 2**62]),
    "absurdly many dimensions": lambda b: node(b, "a", "empty").update(shape=[0] * 100),
    "an absurd length": lambda b: piece(b).update(length=2**62),
    "an absurd offset": lambda b: piece(b).update(offset=2**63 - 1),
    "offsets that lack one": lambda b: piece(b).update(offsets=[0]),
    "a box elsewhere": lambda b: piece(b).update(offsets=[1, 0]),
    "no pieces": lambda b: node(b, "w").update(pieces=[]),
    "a piece of nothing": lambda b: piece(b).update(shape=[0, 3], length=0, crc32=[]),
    "bytes that pieces share": shared,
    "a CRC too many": lambda b: piece(b)["crc32"].append(1),
    "a negative CRC": lambda b: piece(b).update(crc32=[-1]),
    "a CRC of 33 bits": lambda b: piece(b).update(crc32=[2**32]),
    "another step": lambda b: b.update(step=7),
    "no world": lambda b: b.pop("world_size"),
    "an absurd world": lambda b: b.update(world_size=2**64 - 1),
    "an absurd year": lambda b: b.update(created=1e300),
    "a version that is no number": lambda b: b.update(version="2"),
}  # fmt: skip


@pytest.mark.parametrize("what", STRUCTURE)
def test_a_manifest_that_lies_is_damaged(
    place: Path, what: str, differences: Differences, caplog: pytest.LogCaptureFixture
) -> None:
    body = body_of(place)
    STRUCTURE[what](body)
    lie(place, body)
    name, lies = manifest_of(place).name, manifest_of(place).read_bytes()
    manager = CheckpointManager(place)
    assert (manager.latest(), manager.steps()) == (1, [1])
    assert differences(manager.load(), state_of(1)) == []
    [record] = caplog.records
    assert name in record.getMessage()
    assert "is damaged" in record.getMessage()
    assert (place / "damaged" / "step-000000000002" / name).read_bytes() == lies
    with pytest.raises(CheckpointError, match="no good checkpoint of step 2"):
        manager.load(2)


def test_of_one_that_lies_the_tensors_are_not_loaded_and_it_keeps_no_place(place: Path) -> None:
    body = body_of(place)
    STRUCTURE["an absurd shape"](body)
    lie(place, body)
    manager = CheckpointManager(place, keep=1)
    assert manager.load_tensors("w")["w"][0, 1] == 1
    with pytest.raises(CheckpointError, match="no good checkpoint of step 2"):
        manager.load(2)
    manager.save(3, state_of(3)).wait()
    assert manager.steps() == [3]


def test_a_dtype_of_a_later_torch_is_refused_not_damaged(place: Path) -> None:
    body = body_of(place)
    node(body, "w")["dtype"] = "float4_of_tomorrow"
    lie(place, body)
    with pytest.raises(CheckpointError, match="cannot load w: unknown torch dtype"):
        CheckpointManager(place).load()
    assert not (place / "damaged").exists()


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 1.5, -0.0, 1e300),
    *("", "x", "0", "nan", "\u00e9", "a/b", "..", "float16", "<f8", "|O", "dict", "list", "int", "0x1f"),
    *([], [0], [[]], {}, {"path": []}),
)  # fmt: skip


def _places(item: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with every key of it."""
    for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
        yield item, key
        if isinstance(child, dict | list):
            yield from _places(child)


def changed(body: Body, rng: random.Random) -> Body:
    """One to three changes anywhere."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = list(_places(body))
        holder, key = rng.choice(every)
        other, place = rng.choice(every)
        how = rng.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1:
            holder[key] = copy.deepcopy(other[place])
        elif how == 2 and isinstance(holder, list):
            holder.insert(rng.randint(0, len(holder)), copy.deepcopy(holder[key]))
        elif how == 3 and isinstance(holder, list):
            rng.shuffle(holder)
        elif how == 4 and isinstance(holder[key], int):
            holder[key] = max(-(2**63), min(2**64 - 1, holder[key] + rng.choice((-1, 1, 1 << 40))))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return body


def loaded(place: Path, step: int | None) -> Any:
    """None where it is refused as it may be."""
    try:
        return CheckpointManager(place).load(step)
    except CheckpointError as error:
        refused = "format version", "unknown torch dtype", "unknown numpy dtype"
        if step is None and not any(text in str(error) for text in refused):
            raise
        return None


@pytest.mark.deadline(480 + LIES)
def test_whatever_a_manifest_says(good: Path, place: Path, differences: Differences) -> None:
    rng, body = draws.drawn("lies"), body_of(good)
    back = new = 0
    for number in range(LIES):
        shutil.rmtree(place)
        shutil.copytree(good, place)
        lie(place, changed(body, rng))
        catalog = Catalog(DirectoryStorage(place))
        summaries(catalog)
        try:
            verifier = Verifier(catalog)
            for generation in catalog.generations():
                verifier.verify(generation)
            Snapshot.open(catalog).state()
        except (CheckpointError, StorageError):
            pass
        one = loaded(place, 2 if number % 2 else None)
        both = one, loaded(place, None)
        if (place / "damaged").exists():
            back += 1
            assert differences(both[1], state_of(1)) == []
            assert one is None or number % 2 == 0
        else:
            new += both[1] is not None
    assert back > LIES // 2
    assert new > LIES // 100, "some changes do no harm"
