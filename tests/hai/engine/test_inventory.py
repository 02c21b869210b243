"""GPUs of the machine: as NVML reports them, as `--gpus` names them, and as ranks see them."""

import asyncio
from typing import Any

import pytest
from tests.hai.engine.conftest import Stage
from tests.waiting import until

from fireflyer.errors import ConfigError
from fireflyer.hai.engines.inventory import (
    Device,
    default_nodes,
    divide,
    kind_of,
    parse_inventory,
    read,
)
from fireflyer.hai.sampling.usage import read_usage


class FakeNVML:
    """The calls of the library that `read` makes; names and ids as bytes, as old versions have them."""

    def __init__(self, *products: str) -> None:
        self.products = products

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.products)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return self.products[handle].encode()

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}a{handle}-4711"


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("Quadro RTX 6000", "rtx-6000"),
        ("NVIDIA Graphics Device", ""),
    ],
)
def test_types_are_short_names_of_products(product: str, kind: str) -> None:
    assert kind_of(product) == kind


def test_the_driver_names_the_gpus_and_the_environment_limits_them() -> None:
    nvml: Any = FakeNVML("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB", "Tesla V100")

    def found(visible: str | None) -> list[str]:
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return [device.name for device in read(nvml, environment)]

    assert found(None) == ["0", "1", "2"]
    assert found("") == []
    assert found("2, 0") == ["0", "2"]
    assert found("GPU-1a1,GPU-2a2-4711") == ["1", "2"]
    assert found("1,7,0") == ["1"], "CUDA ends at the first unknown device"
    assert found("1,1,0") == ["1"]
    assert found("MIG-3") == []
    assert read(nvml, {})[2] == Device(name="2", kind="v100", index=2)


def test_a_list_by_hand_overrides_the_driver() -> None:
    assert parse_inventory("2:A100,1:v100") == (
        Device(name="0", kind="a100"),
        Device(name="1", kind="a100"),
        Device(name="2", kind="v100"),
    )
    assert parse_inventory("0") == ()
    assert [device.kind for device in parse_inventory("2")] == ["", ""]
    for text in ("", "a100:8", "8:", "8:a100,", "-1", "1025", "8:a 100", "99999:a"):
        with pytest.raises(ConfigError, match="invalid --gpus"):
            parse_inventory(text)


def test_nodes_share_the_gpus_by_type() -> None:
    def sizes(text: str, nodes: int) -> list[list[str]]:
        shares = divide(parse_inventory(text), nodes)
        return [[f"{device.name}{device.kind}" for device in share] for share in shares]

    assert sizes("8", 1) == [["0", "1", "2", "3", "4", "5", "6", "7"]]
    assert sizes("5:a", 2) == [["0a", "1a", "2a"], ["3a", "4a"]]
    assert sizes("4:a,1:b", 3) == [["0a", "1a"], ["2a", "3a"], ["4b"]]
    assert sizes("1:a", 3) == [["0a"], [], []]
    assert sizes("0", 2) == [[], []]
    with pytest.raises(ConfigError, match=r"GPUs of 2 types .*--nodes 2 or more"):
        sizes("1:a,1:b", 1)
    assert default_nodes(parse_inventory("1:a,4:b,1:a"), 5) == 2
    assert default_nodes((), 5) == 5


SEEN = """
    report(*(repr(os.environ.get(name)) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")))
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_ranks_see_their_own_gpus(stage: Stage, start: Any) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine(2, gpus="8:a100")
        assert [(node.gpus, node.gpu_type) for node in engine.nodes()] == [(4, "a100"), (4, "a100")]
        script = stage.script(SEEN)
        env = {"CUDA_VISIBLE_DEVICES": "7"}
        gang = stage.gang(script, start=start, devices=((1, 3), (0,)), env=env)
        await engine.launch(gang)
        await stage.ended(engine)
        assert sorted(await stage.reports(2)) == [
            ["0", "'1,3'", "'PCI_BUS_ID'"], ["1", "'4'", "'PCI_BUS_ID'"]
        ]  # fmt: skip
        again = stage.gang(script, start=start, attempt=2, devices=((0,), (3,)), env=env)
        await engine.launch(again)
        await stage.ended(engine)
        assert sorted(words[1] for words in await stage.reports(2)) == ["'0'", "'7'"]

    stage.play(scene)


def test_ranks_on_a_node_without_gpus_see_none(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine(2, gpus="1:a100")
        await engine.launch(stage.gang(SEEN, start="exec", devices=((0,), ())))
        await stage.ended(engine)
        assert sorted(words[1] for words in await stage.reports(2)) == ["''", "'0'"]

    stage.play(scene)


def test_without_an_inventory_the_environment_stays(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine(1)
        env = {"CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
        await engine.launch(stage.gang(SEEN, nodes=1, start="exec", env=env))
        await stage.ended(engine)
        assert await stage.reports(1) == [["0", "'5'", "'FASTEST_FIRST'"]]

    stage.play(scene)


def test_a_supervisor_samples_what_runs(stage: Stage) -> None:
    async def scene(stage: Stage) -> None:
        engine = stage.engine(1)
        gang = stage.gang("report('up'); forever()", nodes=1, start="exec")
        await engine.launch(gang)
        await stage.reports(1)
        path = gang.directory / "n0.usage"
        await asyncio.to_thread(until, lambda: read_usage(path) is not None)
        await engine.stop(gang.task, 1, 0.0)
        await stage.ended(engine)
        found = read_usage(path)
        assert found is not None
        assert found.ranks[0].memory_sum > 0

    stage.play(scene)
