"""The control segment on its memory nodes: what the kernel says about the memory of a real team."""

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fireflyer._native import hfreduce as native
from fireflyer.errors import NoSpace, StorageError
from fireflyer.hfreduce import placement

PAGE = 4096
GET_MEMPOLICY, OF_ADDRESS = 239, 2
DEFAULT, BIND, INTERLEAVE = 0, 2, 3  # as the kernel numbers its modes


def first_node_only(members: int, interface: str) -> list[native.Placed]:
    """The paper's rules on a machine whose only node is number 0."""
    size = native.control_bytes(members)
    ring = (size - size // (members + 1)) // PAGE * PAGE
    return [
        native.Placed(offset=PAGE, bytes=ring - PAGE, mode=native.NumaMode.INTERLEAVE, nodes=[0]),
        native.Placed(offset=ring, bytes=size - ring, mode=native.NumaMode.BIND, nodes=[0]),
    ]


def policy_at(address: int) -> tuple[int, int]:
    """(mode, mask of nodes) that the kernel keeps for the page at an address."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    arguments = (ctypes.byref(mode), mask, ctypes.c_ulong(1025), ctypes.c_void_p(address))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(GET_MEMPOLICY, *arguments, ctypes.c_ulong(OF_ADDRESS)) != 0:
        raise OSError(ctypes.get_errno(), "get_mempolicy")
    return mode.value, mask[0]


def address_of(name: str) -> int:
    """Where this process has mapped a segment."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return int(next(line for line in maps if f"/memfd:{name}" in line).partition("-")[0], 16)


def why_not() -> str:
    if os.uname().machine != "x86_64":
        return "the test knows the number of the system call on x86-64 alone"
    try:
        os.close(native.create_segment("probe", PAGE, [_bound(0, PAGE)]))
    except StorageError as error:
        return str(error)
    return ""


def _bound(offset: int, size: int, node: int = 0) -> native.Placed:
    return native.Placed(offset=offset, bytes=size, mode=native.NumaMode.BIND, nodes=[node])


def test_every_rank_of_a_team_has_placed_memory(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not():
        pytest.skip(f"needs memory policies: {reason}")
    monkeypatch.setattr(native, "control_placement", first_node_only)

    def body(rank: int, world: int) -> list[tuple[int, int]]:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)
        tensor = torch.full((1 << 20,), rank + 1.0)
        dist.all_reduce(tensor)
        assert bool((tensor == 6.0).all())
        start = address_of("fireflyer-control")
        return [policy_at(start + at) for part in plan for at in (part.offset - PAGE, part.offset)]

    plan = first_node_only(3, "lo")
    for seen in start_gang(body, 3).results():
        assert seen == [(DEFAULT, 0), (INTERLEAVE, 1), (INTERLEAVE, 1), (BIND, 1)]


def test_on_one_node_nothing_is_placed() -> None:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    plan = native.control_placement(2, "lo")
    if len(nodes) < 2:
        assert plan == []
    else:
        assert [part.mode for part in plan] == [native.NumaMode.INTERLEAVE]  # "lo" has no node


def test_refused_placement_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = native.create_segment

    def refuse(name: str, size: int, parts: Any = ()) -> int:
        if parts:
            raise StorageError("cannot place: Operation not permitted")
        return create(name, size)

    monkeypatch.setattr(native, "control_placement", first_node_only)
    monkeypatch.setattr(native, "create_segment", refuse)
    placement._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "fireflyer.hfreduce"):
        for _ in range(2):
            control = placement.create_control(2, "127.0.0.1")
            assert os.fstat(control).st_size == native.control_bytes(2)
            os.close(control)
    assert [record.getMessage() for record in caplog.records] == [
        "shared memory is not placed on NUMA nodes: cannot place: Operation not permitted"
    ]


def test_refused_memory_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(name: str, size: int, parts: Any = ()) -> int:
        calls.append(parts)
        raise NoSpace("no memory")

    monkeypatch.setattr(native, "control_placement", first_node_only)
    monkeypatch.setattr(native, "create_segment", refuse)
    with pytest.raises(NoSpace):
        placement.create_control(2, "127.0.0.1")
    assert len(calls) == 1


@pytest.mark.parametrize(("offset", "size"), [(PAGE, PAGE), (0, 2 * PAGE), (2 * PAGE, 0)])
def test_ranges_lie_inside_the_segment(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="outside the segment"):
        native.create_segment("outside", PAGE, [_bound(offset, size)])


def test_nodes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no memory node 5000"):
        native.create_segment("nowhere", PAGE, [_bound(0, PAGE, 5000)])


def test_the_interface_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_IFNAME", raising=False)
    assert placement.interface_with("127.0.0.1") == "lo"
    assert placement.interface_with("192.0.2.1") == ""
    monkeypatch.setenv("FIREFLYER_IFNAME", "ib7")
    assert placement.interface_with("127.0.0.1") == "ib7"
