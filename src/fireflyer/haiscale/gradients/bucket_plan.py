"""Division of a model's parameters into buckets. Pure: ranks and the planner compute equal
buckets."""

from collections.abc import Sequence

DEFAULT_BUCKET_BYTES = 2 << 20
"""Default size at which a bucket is closed."""
PIECE_BYTES = 8 << 20
"""Size of a piece in bytes. A large parameter can make a bucket larger; such a bucket is reduced in
pieces."""


def plan(
    sizes: Sequence[int], kinds: Sequence[object], order: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Cuts parameters into buckets.

    Args:
        sizes: size of each parameter in bytes.
        kinds: kind of each parameter (dtype and device, for example); a bucket has one kind.
        order: indexes of the parameters in the order in which gradients become ready.
        bucket_bytes: size at which a bucket is closed.

    Returns:
        Indexes of the parameters of each bucket. Buckets are in the order in which they become
        full, so that reductions can start in this order.
    """
    buckets: list[list[int]] = []
    filling: dict[object, tuple[int, list[int]]] = {}
    for index in order:
        held, members = filling.pop(kinds[index], (0, []))
        members.append(index)
        held += sizes[index]
        if held < bucket_bytes:
            filling[kinds[index]] = (held, members)
        else:
            buckets.append(members)
    place = {index: at for at, index in enumerate(order)}
    buckets += [members for _, members in filling.values()]
    return sorted(buckets, key=lambda members: place[members[-1]])
