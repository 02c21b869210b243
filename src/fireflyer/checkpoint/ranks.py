"""Agreement between the ranks of a job, over the default group of torch.distributed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def exchange(values: Sequence[int]) -> list[list[int]]:
    """Every rank's values, by rank; collective where there are several ranks.

    It is one all-reduce of float64, which every backend has; so |value| < 2**53.
    """
    rank, world = rank_and_world()
    if world == 1:
        return [list(values)]
    device = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    )
    table = torch.zeros(world, len(values), dtype=torch.float64, device=device)
    table[rank] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table)
    return [[int(value) for value in row] for row in table.tolist()]


def from_first(values: Sequence[int]) -> list[int]:
    """Rank 0's values on every rank; collective where there are several ranks."""
    return exchange(values)[0]
