"""Check that all ranks create their groups in the same order.

torch numbers groups in the order of their creation on each rank. Ranks that create them in another
order meet under one number with other members in mind, and would reduce other groups' values.
"""

from collections.abc import Sequence
from typing import Protocol

from fireflyer.errors import ConfigError


class OrderStore(Protocol):
    """Methods that the check needs of a store; `torch.distributed` stores have them."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


_BROKEN = "fireflyer: order of groups"


class CreationOrder:
    """One rank's creation of a group.

    Args:
        store: store of the ranks that create a group under this name.
        job: store of all ranks; a difference under any name reaches the ranks that wait there.
        name: torch's name of the group, its number.
        rank: this rank, in the default group.
        members: ranks of the group, in the default group.
    """

    def __init__(
        self, store: OrderStore, job: OrderStore, name: str, rank: int, members: Sequence[int]
    ) -> None:
        self._job = job
        mine = f"rank {rank} creates it of ranks {list(members)}"
        _, _, seen = store.compare_set("order", "", mine).decode().partition(" of ranks ")
        first = store.get("order").decode()
        if seen != str(list(members)):
            self._job.set(
                _BROKEN,
                f"the ranks create groups in different orders: of group {name}, {first}, but {mine}; "
                "call new_group for the same groups in the same order on all ranks",
            )
        self.check()

    def check(self) -> None:
        """Raises ConfigError if the ranks' orders differ; called again while the rank waits."""
        if self._job.check([_BROKEN]):
            raise ConfigError(self._job.get(_BROKEN).decode())
