"""Only one rank of several calls a function that all must call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.interrupts import interrupted

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError


def test_a_save_that_other_ranks_do_not_make(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Any
) -> None:
    def body(rank: int, world: int) -> str:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        if rank > 0:
            store.wait(["rank 0 is done"])
            return ""
        manager = CheckpointManager(tmp_path / "run", commit_deadline_s=1.0)
        with pytest.raises(
            CheckpointError, match="some of the 2 ranks did not make this call"
        ) as caught:
            manager.save(1, {"x": torch.ones(1)}).wait()
        store.set("rank 0 is done", "")
        return str(caught.value)

    said, _ = start_gang(body, 2).results()
    assert "call save, load and should_save on all ranks" in said


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "second"])
def test_an_interrupt_of_a_save_that_waits_for_other_ranks(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Any, earlier: bool
) -> None:
    """Ctrl-C ends the wait at once, whether the ranks' group exists or is being made."""

    def body(rank: int, world: int) -> bool:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        manager = CheckpointManager(tmp_path / "run", commit_deadline_s=100.0)
        if earlier:
            manager.save(1, {"x": torch.ones(1)}).wait()
        if rank > 0:
            store.wait(["rank 0 is done"])
            return True
        was = interrupted(lambda: manager.save(2, {"x": torch.ones(1)}))
        if earlier:
            with pytest.raises(CheckpointError, match="an earlier call was interrupted"):
                manager.save(3, {"x": torch.ones(1)})
        store.set("rank 0 is done", "")
        return was

    assert start_gang(body, 2).results() == [True, True]
