"""Only one rank of several calls a function that all must call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
