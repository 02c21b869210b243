"""The CUDA device over a stub of the runtime: which calls it makes, in which order, with what arguments."""

import datetime
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import Play
from tests.hfreduce.devices.device_memory import build_stub, named, stubbed

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, RankFailed

ALREADY_REGISTERED = 712


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stub, compiled."""
    return build_stub(tmp_path_factory.mktemp("cudart"))


def test_calls_and_arguments(play: Play, stub_path: str) -> None:
    def body(rank: int, world: int) -> None:
        with stubbed(stub_path) as (stub, stream):
            tensor = torch.full((2_500_000,), rank + 1.0)
            dist.all_reduce(tensor)
            stub.synchronize(stream)
            assert bool((tensor == 3.0).all())
            log = stub.log()
            inward, outward = (
                line.split()[0] for line in named(log, "cudaStreamCreateWithFlags")[1:]
            )
            # non-blocking streams; events without timing; portable and mapped registration
            assert named(log, "cudaStreamCreateWithFlags")[1:] == [
                f"{inward} flags 1",
                f"{outward} flags 1",
            ]
            assert set(named(log, "cudaEventCreateWithFlags")) == {"flags 2"}
            (registered,) = named(log, "cudaHostRegister")
            assert registered.endswith(" flags 3")
            parts = ["4194304", "4194304", "1611392"]
            copies = named(log, "cudaMemcpyAsync")
            assert copies[:3] == [f"{part} kind 2 on {inward}" for part in parts]
            assert copies[3:] == [f"{part} kind 1 on {outward}" for part in parts]
            waits = named(log, "cuStreamWaitValue32")
            assert waits == [f"{part} flags 0 on {outward}" for part in (1, 2, 3)]
            assert named(log, "cudaLaunchHostFunc") == [f"on {inward}"] * 3 + [f"on {outward}"]
            check_order(log, str(stream), inward, outward)
            dist.all_reduce(tensor[:1000])
            stub.synchronize(stream)
            known = named(stub.log(), "cudaHostRegister")
            dist.all_reduce(tensor[:1000])
            stub.synchronize(stream)
            assert named(stub.log(), "cudaHostRegister") == known, "once a segment"
            assert len(named(stub.log(), "cudaStreamCreateWithFlags")) == 3

    def check_order(log: list[str], user: str, inward: str, outward: str) -> None:
        """The inward stream begins behind the user's, whose last command is to wait for the outward's end."""
        ready = next(line for line in named(log, "cudaEventRecord") if line.endswith(f" on {user}"))
        event = ready.split()[0]
        waits = named(log, "cudaStreamWaitEvent")
        assert waits[0] == f"{inward} for {event} flags 0"
        done = named(log, "cudaEventRecord")[-1]
        assert done.endswith(f" on {outward}")
        assert waits[-1] == f"{user} for {done.split()[0]} flags 0"
        # Each part's way out begins behind the end of its way in.
        copied = [line.split()[0] for line in named(log, "cudaEventRecord")[1:-1]]
        assert waits[1:-1] == [f"{outward} for {event} flags 0" for event in copied]

    play(body, "AA")


def test_another_device_is_current_only_during_a_call(play: Play, stub_path: str) -> None:
    def body(rank: int, world: int) -> None:
        with stubbed(stub_path, index=3) as (stub, stream):
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
            stub.synchronize(stream)
            chosen = named(stub.log(), "cudaSetDevice")
            assert chosen == ["3", "0"] * (len(chosen) // 2)
            assert len(chosen) > 0

    play(body, "A")


def test_memory_that_is_registered_already_is_fine(play: Play, stub_path: str) -> None:
    def body(rank: int, world: int) -> None:
        with stubbed(stub_path) as (stub, stream):
            stub.fail("cudaHostRegister", ALREADY_REGISTERED)
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
            stub.synchronize(stream)
            assert "cudaGetLastError " in stub.log(), "nobody else shall find that error"

    play(body, "A")


@pytest.mark.parametrize(
    "function", ["cudaHostRegister", "cudaMemcpyAsync", "cudaLaunchHostFunc", "cuStreamWaitValue32"]
)
def test_a_runtime_that_fails_names_this_rank_to_all(
    play: Play, stub_path: str, function: str
) -> None:
    def body(rank: int, world: int) -> int | None:
        with stubbed(stub_path) as (stub, _):
            if rank == 1:
                stub.fail(function, 801)
                with pytest.raises(CollectiveError, match=f"{function}.*801"):
                    dist.all_reduce(torch.ones(1000))
                return None
            work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
            with pytest.raises(RankFailed, match="could not stage") as caught:
                work.wait(datetime.timedelta(seconds=20))
            return caught.value.rank

    assert play(body, "AA", leave=False) == [1, None]


def test_a_missing_runtime_is_told(play: Play, stub_path: str) -> None:
    def body(rank: int, world: int) -> None:
        os.environ.update(FIREFLYER_CUDART="/nowhere/libcudart.so", FIREFLYER_CUDA=stub_path)
        with pytest.raises(CollectiveError, match=r"FIREFLYER_CUDART.*/nowhere/libcudart\.so"):
            native.cuda_device(0)
        os.environ["FIREFLYER_CUDART"] = "libm.so.6"
        with pytest.raises(CollectiveError, match="no cudaGetDevice"):
            native.cuda_device(0)
        os.environ.update(FIREFLYER_CUDART=stub_path, FIREFLYER_CUDA="libm.so.6")
        with pytest.raises(CollectiveError, match="no cuStreamWaitValue32_v2"):
            native.cuda_device(0)
        os.environ["FIREFLYER_CUDA"] = stub_path
        native.cuda_device(0)  # a failure is not remembered

    play(body, "A")
