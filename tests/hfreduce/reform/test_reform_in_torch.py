"""A torch process group is formed anew in place: survivors and newcomers go on with the same object."""

import datetime
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import die, init, meet
from torch._C._distributed_c10d import ErrorType

import fireflyer.hfreduce as hfreduce
from fireflyer.errors import CollectiveError, ConfigError, DeadlineExceeded
from fireflyer.hfreduce.reform import join
from fireflyer.hfreduce.rendezvous.peer_exchange import PeerExchange

MINUTE = datetime.timedelta(seconds=60)


def store_server(start_gang: Callable[..., Any]) -> int:
    """Starts a TCPStore in a process of its own and returns its port.

    A store's thread may hold a lock of torch at any time: ranks forked beside it may hang.
    """
    read, write = os.pipe()

    def serve(rank: int, world: int) -> None:
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(write, server.port.to_bytes(2))
        signal.pause()

    start_gang(serve, 1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return int.from_bytes(pipe.read(2))


def test_a_manager_forms_the_group_by_a_store(
    start_gang: Callable[..., Any], tmp_path: Path
) -> None:
    """The way of torchft: after each quorum all of its members call `configure`."""
    address = f"127.0.0.1:{store_server(start_gang)}/"

    def count(call: Callable[[], Any]) -> int:
        """How often `call` gives something."""
        return sum(1 for _ in iter(call, None))

    def total(group: Any) -> float:
        tensor = torch.ones(1_000)
        group.allreduce([tensor]).wait()
        return float(tensor[0])

    def body(rank: int, world: int) -> list[float]:
        group = hfreduce.ProcessGroupHFReduce.alone(MINUTE)
        totals = [total(group)]
        group.configure(address + "quorum/1", f"replica{rank}", rank, world, quorum_id=1)
        totals.append(total(group))
        meet(str(tmp_path / "met"), rank, world)
        if rank == 0:
            die()
        with pytest.raises(CollectiveError):
            count(lambda: total(group))
        assert group.errored() is not None
        assert group.get_error() == ErrorType.REMOTE_ERROR
        group.configure(address + "quorum/2", f"replica{rank}", rank - 1, world - 1)
        assert group.errored() is None
        assert group.get_error() == ErrorType.SUCCESS
        assert (group.rank(), group.size()) == (rank - 1, world - 1)
        totals.append(total(group))
        if rank == 1:  # the others wait for a call that never comes
            late = group.allreduce([torch.ones(10)])
        group.configure(address + "quorum/3", f"replica{rank}", rank - 1, world - 1)
        if rank == 1:
            with pytest.raises(CollectiveError):
                late.wait()
        totals.append(total(group))
        return totals

    assert start_gang(body, 3).results() == [None, [1, 3, 2, 2], [1, 3, 2, 2]]


class Options(NamedTuple):
    """As torch's ReconfigureOptions, which come with torch 2.14."""

    handles: Any
    uuid: int
    timeout: datetime.timedelta | None = None


def exchange(path: Path, rank: int, members: list[int], handle: str) -> list[str]:
    """The handles of all members, by a file."""
    store = dist.FileStore(str(path), -1)
    store.set(str(rank), handle)
    return [store.get(str(member)).decode() for member in members]


def test_a_manager_forms_the_group_by_handles(
    start_gang: Callable[..., Any], tmp_path: Path
) -> None:
    """torchft's newer way: members tell it their handles, and each quorum is a list of them."""

    def body(rank: int, world: int) -> list[float]:
        group = hfreduce.ProcessGroupHFReduce.alone(MINUTE)
        assert group.supports_reconfigure
        handle = group.get_reconfigure_handle()
        assert handle == group.get_reconfigure_handle()
        sums = []
        for number, members in enumerate(([0, 1, 2], [2, 1], [1, 2])):
            if rank not in members:
                meet(str(tmp_path / "left"), rank, world)
                break
            handles = exchange(tmp_path / str(number), rank, members, handle)
            assert group.reconfigure(Options(handles, number, MINUTE)).wait()
            assert (group.rank(), group.size()) == (members.index(rank), len(members))
            tensor = torch.full((1_000,), float(rank))
            group.allreduce([tensor]).wait()
            sums.append(float(tensor[0]))
            if number == 0 and rank != 0:
                meet(str(tmp_path / "left"), rank, world)
        return sums

    assert start_gang(body, 3).results() == [[3], [3, 3, 3], [3, 3, 3]]


def test_one_process_holds_two_members(start_gang: Callable[..., Any], tmp_path: Path) -> None:
    """Three processes, two members in the middle one, in a thread each; then one of them leaves."""

    def body(rank: int, _: int) -> list[float]:
        groups = [hfreduce.ProcessGroupHFReduce.alone(MINUTE) for _ in range(1 + (rank == 1))]
        first = rank + (rank == 2)

        def member(place: int) -> float:
            group = groups[place - first]
            handle = group.get_reconfigure_handle()
            handles = exchange(tmp_path / "four", place, [0, 1, 2, 3], handle)
            assert group.reconfigure(Options(handles, 1, MINUTE)).wait()
            assert (group.rank(), group.size()) == (place, 4)
            tensor = torch.full((100_000,), float(place + 1))
            group.allreduce([tensor]).wait()
            sums = float(tensor[0])
            if place == 1:
                group.shutdown()
                return sums
            handles = exchange(tmp_path / "three", place, [0, 2, 3], handle)
            assert group.reconfigure(Options(handles, 2, MINUTE)).wait()
            group.allreduce([tensor]).wait()
            return float(tensor[0])

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(member, range(first, first + len(groups))))

    assert start_gang(body, 3).results() == [[30], [10, 30], [30]]


@pytest.mark.parametrize(
    ("handles", "reason"),
    [
        ({"a"}, "expected a list"),
        (["a"], "invalid hfreduce handle"),
        (['{"id":"x","store":"h:1"}'], "this group's own"),
    ],
)
def test_bad_handles_are_refused(handles: Any, reason: str) -> None:
    group = hfreduce.ProcessGroupHFReduce.alone(MINUTE)
    with pytest.raises(ConfigError, match=reason):
        group.reconfigure(Options(handles, 1))
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    group.shutdown()


def test_a_rank_that_is_late_fills_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's TCPStore logs each wait that ends without the key."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False)
    with pytest.raises(DeadlineExceeded, match="rank 1 did not arrive within"):
        PeerExchange(client, 0, 2, 0.6).info_of(1)
    assert "waitForInput" not in capfd.readouterr().err


@pytest.mark.parametrize("address", ["", "host", "host:1", "host:x/a", ":1/a", "/a"])
def test_a_bad_address_of_a_store_is_refused(address: str) -> None:
    group = hfreduce.ProcessGroupHFReduce.alone(MINUTE)
    with pytest.raises(ConfigError, match="host:port/prefix"):
        group.configure(address, "r", 0, 1)
    group.shutdown()


def reduce_for_ever(tensor: torch.Tensor) -> None:
    while True:
        dist.all_reduce(tensor)


def test_survivors_of_rank_0s_host_go_on_and_a_newcomer_joins(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")

    def newcomer() -> Any:
        os.environ["FIREFLYER_NODE"] = "new"
        store = dist.FileStore(str(tmp_path / "members"), 4)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            os.environ.pop(name, None)
        os.environ["FIREFLYER_JOIN"] = store.get("address").decode()
        dist.init_process_group("hfreduce", timeout=MINUTE)
        return dist.group.WORLD

    def body(rank: int, world: int) -> Any:
        if rank == 4:
            group: Any = newcomer()
        else:
            group = init(store_path, rank, 4)
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            assert tensor[0] == 4
            if rank == 3:
                dist.FileStore(str(tmp_path / "members"), 4).set("address", group.join_address)
            meet(store_path, rank, 4)
            if rank == 0:
                die()
            with pytest.raises(CollectiveError):
                reduce_for_ever(tensor)
            assert isinstance(group.errored(), CollectiveError)
            befores = group.reform(MINUTE)
            assert befores in ([1, 2, 3], [1, 2, 3, -1])
            assert group.errored() is None
        assert group.get_error() == ErrorType.SUCCESS
        while group.size() < 4:  # the newcomer may have come too late for the first time
            assert dist.get_process_group_ranks(None) == [0, 1, 2]
            group.reform(MINUTE)
        assert (group.joined, group.epoch > 0) == (rank == 4, True)
        value = torch.full((100_000,), float(dist.get_rank()))
        dist.all_reduce(value)
        dist.broadcast(value, src=3)
        assert dist.get_world_size() == 4
        assert dist.get_process_group_ranks(None) == [0, 1, 2, 3]
        assert group.join_addresses[group.rank()] == group.join_address
        return dist.get_rank(), float(value[0])

    gang = start_gang(body, 5, nodes=5)
    results = [gang.result(rank) for rank in (1, 2, 3, 4)]
    assert results == [(0, 6.0), (1, 6.0), (2, 6.0), (3, 6.0)]


def test_joining_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_SECRET", raising=False)
    with pytest.raises(ConfigError, match="FIREFLYER_SECRET"):
        hfreduce.ProcessGroupHFReduce.join(["127.0.0.1:1"], MINUTE)


@pytest.mark.parametrize(
    ("value", "match"),
    [("/no/such/file", "or a file"), ("host:1", "or a file"), ("empty", "holds no addresses")],
)
def test_a_join_that_names_no_member_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, match: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIREFLYER_JOIN", value)
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")
    with pytest.raises(ConfigError, match=match):
        dist.init_process_group("hfreduce", timeout=MINUTE)


def test_members_are_addresses_or_a_file_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = ["10.0.0.1:4711/00ff", "10.0.0.2:4712/00ff"]
    join.write_members(tmp_path / "members", members)
    assert [path.name for path in tmp_path.iterdir()] == ["members"]
    for value in (",".join(members), str(tmp_path / "members")):
        monkeypatch.setenv("FIREFLYER_JOIN", value)
        assert join.addresses() == members
    (tmp_path / "link").symlink_to("members")
    join.write_members(tmp_path / "link", members[:1])
    assert (tmp_path / "link").is_symlink()
    assert join.addresses() == members[:1]
    with pytest.raises(ConfigError, match="cannot write"):
        join.write_members(tmp_path / "no" / "members", members)


def test_other_backends_do_not_start_alone_where_one_is_to_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIREFLYER_JOIN", "10.0.0.1:4711/00ff")
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo")
    assert not dist.is_initialized()
