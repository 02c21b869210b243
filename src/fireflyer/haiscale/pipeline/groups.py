"""Process groups of a training run with pipelines; the arrangement decides which ranks share a
network card."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fireflyer.haiscale.pipeline.placement import STAGGERED, grid


def make_subgroups(
    *, pp_size: int, tp_size: int = 1, ep_size: int = 1, placement: str = STAGGERED
) -> tuple[ProcessGroup, ...]:
    """Makes this rank's groups of backend "hfreduce". Collective over the default group.

    Args:
        pp_size: number of ranks in a pipeline.
        tp_size: number of neighbouring ranks that share each layer.
        ep_size: number of data-parallel ranks that share experts.
        placement: "staggered" puts the same stage of several pipelines on one host, so that their
            sends can take turns on the host's card; "compact" puts the stages of one pipeline on
            one host.

    Returns:
        (data-parallel group, pipeline group), then the tensor-parallel group if `tp_size` is above
        1, then the expert-parallel group if `ep_size` is above 1.

    Raises:
        ConfigError: an argument is invalid, or the sizes do not divide the number of ranks.
    """
    world = dist.get_world_size()
    columns = grid(world, pp_size, tp_size, ep_size, placement)
    wanted = ["dp", "pp"] + ["tp"] * (tp_size > 1) + ["ep"] * (ep_size > 1)
    return tuple(_group(columns[name]) for name in wanted)


def _group(rows: Sequence[Sequence[int]]) -> ProcessGroup:
    me = dist.get_rank()
    found = None
    for ranks in rows:  # every rank takes part in the creation of every group, in this order
        group = dist.new_group(list(ranks), backend="hfreduce")
        if me in ranks:
            found = group
    assert isinstance(found, ProcessGroup)
    return found
