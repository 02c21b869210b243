"""New process groups, also after ranks have died or come, when torch's own way to them is closed.

What is private in torch 2.13 here: `_new_process_group_helper`, and the book `_world` of a group's ranks.
"""

import datetime
import secrets
from collections.abc import Sequence
from typing import Any, Self

import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError
from fireflyer.haiscale.agreement import tell_all

MEETING = datetime.timedelta(seconds=60)
"""How long ranks wait for one another to come into a new group; one of them may have died meanwhile."""


class Founder:
    """Makes process groups of ranks that `groups` connect: rows of a mesh, then its columns. None: of this
    rank alone. A context, entered by all of them; an exception that leaves it destroys what was made.

    By a store and names of its own: the store of torch's default group dies with its host, and the names that
    `new_group` gives depend on how many groups a process has, which differs between ranks.
    """

    def __init__(self, *groups: hfreduce.ProcessGroupHFReduce) -> None:
        self._known = groups
        self._store: dist.Store = dist.HashStore()
        self._token = secrets.token_hex(8)
        self._limit = dist.distributed_c10d.default_pg_timeout
        self._made: list[hfreduce.ProcessGroupHFReduce] = []

    def __enter__(self) -> Self:
        if any(group.size() > 1 for group in self._known):
            self._open()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            return
        for group in self._made:
            group.abort()
            dist.destroy_process_group(group)

    def _open(self) -> None:
        """The first rank of all has the store."""
        first = all(group.rank() == 0 for group in self._known)
        self._limit = datetime.timedelta(seconds=self._known[0]._timeout_s)
        where: list[Any] = []
        if first:
            mine = self._known[0]._connection.cards[0].address
            self._store = dist.TCPStore(mine, 0, None, True, MEETING, wait_for_workers=False)
            where = [mine, self._store.port, self._token]
        for group in self._known:
            where = tell_all(where, group)[0]
        address, port, self._token = where
        if first:
            return
        try:
            self._store = dist.TCPStore(address, port, None, False, MEETING)
        except dist.DistError as error:
            raise CollectiveError(
                f"new groups cannot be made: no way to the store of their first rank: {error}"
            ) from error

    @property
    def groups(self) -> tuple[hfreduce.ProcessGroupHFReduce, ...]:
        """Those made so far."""
        return tuple(self._made)

    def group(self, what: str, ranks: Sequence[int]) -> hfreduce.ProcessGroupHFReduce:
        """Collective among these global ranks, which ask for the same groups in the same order."""
        book = dist.distributed_c10d
        group, _ = book._new_process_group_helper(
            *(len(ranks), ranks.index(dist.get_rank()), list(ranks)),
            *(book.Backend("hfreduce"), self._store),
            book.GroupName(f"haiscale-{what}-{self._token}-{'-'.join(map(str, ranks))}"),
            timeout=min(self._limit, MEETING),
            group_desc=f"haiscale {what}",
        )
        assert isinstance(group, hfreduce.ProcessGroupHFReduce)
        group.set_timeout(self._limit)
        book._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self._made.append(group)
        return group
