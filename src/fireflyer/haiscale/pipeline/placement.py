"""Placement of stages and replicas on ranks, which are numbered host by host. Pure."""

from fireflyer.errors import ConfigError

STAGGERED, COMPACT = "staggered", "compact"


def grid(
    world: int, pp_size: int, tp_size: int = 1, ep_size: int = 1, placement: str = STAGGERED
) -> dict[str, list[list[int]]]:
    """Returns the ranks of all groups of each kind: "dp", "pp", "tp", "ep".

    Raises:
        ConfigError: an argument is invalid, or the sizes do not divide the number of ranks.
    """
    sizes = {"pp_size": pp_size, "tp_size": tp_size, "ep_size": ep_size}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"invalid {name} {size!r}: expected an integer of at least 1")
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
