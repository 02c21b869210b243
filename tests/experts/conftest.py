"""Stores of small experts in folders that a test's end removes."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree

import pytest
import torch

from fireflyer.experts import Store

MIB = 1 << 20
OpenStore = Callable[..., Store]


def state(value: float, mib: float = 1.0) -> dict[str, torch.Tensor]:
    """An expert of about `mib` MiB, all of whose elements are `value`."""
    return {
        "w": torch.full((int(mib * MIB / 4 / 64), 64), value),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    }


def value_of(store: Store, name: str) -> float:
    """Returns the value of an expert after a check that all its elements have it."""
    with store.get(name, timeout_s=60) as expert:
        first = float(expert.tensors["w"][0, 0])
        assert expert.tensors["w"].eq(first).all()
        assert expert.tensors["half"].eq(first).all()
        assert expert.tensors["none"].shape == (0, 4)
        return first


@pytest.fixture
def warm() -> Iterator[Path]:
    path = Path("/dev/shm") / f"fireflyer-test-{uuid.uuid4().hex}"
    yield path
    rmtree(path, ignore_errors=True)


@pytest.fixture
def open_store(tmp_path: Path, warm: Path) -> Iterator[OpenStore]:
    """Opens stores of one folder and one warm memory; closes them."""
    opened: list[Store] = []

    def make(warm_bytes: int | str = "3M", **options: object) -> Store:
        store = Store(
            tmp_path / "experts", warm_bytes=warm_bytes, warm_folder=warm, **options  # type: ignore[arg-type]
        )  # fmt: skip
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def filled(open_store: OpenStore) -> Store:
    """A store with room for two of the four experts e0 to e3 of 1 MiB, whose values are 0 to 3."""
    store = open_store()
    for number in range(4):
        store.add(f"e{number}", state(float(number)))
    return store
