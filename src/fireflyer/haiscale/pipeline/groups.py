"""Process groups of a training run with pipelines: which ranks share a network card."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fireflyer.errors import ConfigError
from fireflyer.haiscale.validation import check_count

STAGGERED, COMPACT = "staggered", "compact"


def make_subgroups(
    *, pp_size: int, tp_size: int = 1, ep_size: int = 1, placement: str = STAGGERED
) -> tuple[ProcessGroup, ...]:
    """Makes this rank's groups of backend "hfreduce". Collective over the default group.

    Args:
        pp_size: number of ranks in a pipeline.
        tp_size: number of neighbouring ranks that share each layer.
        ep_size: number of data-parallel ranks that share experts.
        placement: "staggered" puts the same stage of several pipelines on one host, so that their
            sends can take turns on its card; "compact" puts the stages of one pipeline there.

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


def grid(
    world: int, pp_size: int, tp_size: int = 1, ep_size: int = 1, placement: str = STAGGERED
) -> dict[str, list[list[int]]]:
    """Returns the ranks of all groups of each kind: "dp", "pp", "tp", "ep".

    Raises:
        ConfigError: as for `make_subgroups`.
    """
    sizes = {"pp_size": pp_size, "tp_size": tp_size, "ep_size": ep_size}
    for name, size in sizes.items():
        check_count(name, size, 1)
    if placement not in (STAGGERED, COMPACT):
        raise ConfigError(f"invalid placement {placement!r}: expected 'staggered' or 'compact'")
    if world % (pp_size * tp_size):
        raise ConfigError(
            f"invalid pp_size {pp_size} and tp_size {tp_size}: their product does not divide the "
            f"{world} ranks"
        )
    data = world // (pp_size * tp_size)
    if data % ep_size:
        raise ConfigError(
            f"invalid ep_size {ep_size}: it does not divide the {data} data-parallel ranks"
        )

    def rank(stage: int, replica: int, slot: int) -> int:
        outer = stage * data + replica if placement == STAGGERED else replica * pp_size + stage
        return outer * tp_size + slot

    stages, replicas, slots = range(pp_size), range(data), range(tp_size)
    return {
        "dp": [[rank(s, d, t) for d in replicas] for s in stages for t in slots],
        "pp": [[rank(s, d, t) for s in stages] for d in replicas for t in slots],
        "tp": [[rank(s, d, t) for t in slots] for s in stages for d in replicas],
        "ep": [
            [rank(s, d, t) for d in replicas[first : first + ep_size]]
            for s in stages
            for t in slots
            for first in range(0, data, ep_size)
        ],
    }


def _group(rows: Sequence[Sequence[int]]) -> ProcessGroup:
    me = dist.get_rank()
    found = None
    for ranks in rows:  # every rank takes part in the creation of every group, in this order
        group = dist.new_group(list(ranks), backend="hfreduce")
        if me in ranks:
            found = group
    assert isinstance(found, ProcessGroup)
    return found
