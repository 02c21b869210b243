"""Creation of process groups after ranks have died or joined. torch's `new_group` fails in that
case."""

import datetime
import secrets
from collections.abc import Sequence
from typing import Any, Self

import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError
from fireflyer.haiscale.consistency import tell_all
from fireflyer.torch_internals.distributed import new_process_group, world

MEETING = datetime.timedelta(seconds=60)
"""Maximum time that ranks wait for one another in a new group: a rank may have died meanwhile."""


class GroupFactory:
    """Context in which the ranks connected by `groups` make process groups; all these ranks enter
    the context.

    `groups` are this rank's groups along the rows of a mesh, then along its columns. Without
    `groups`, new groups contain only this rank. If an exception leaves the context, the new groups
    are destroyed.

    The class uses its own store, because the store of torch's default group dies with the host that
    serves it. It also uses its own names: torch's names depend on the number of groups that a
    process has made, which differs between ranks.
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
        """Opens the store, which the first of all ranks serves."""
        first = all(group.rank() == 0 for group in self._known)
        self._limit = datetime.timedelta(seconds=self._known[0]._timeout_s)
        where: list[Any] = []
        if first:
            mine = self._known[0]._connection.infos[0].address
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
                f"cannot create new groups: their first rank's store is unreachable: {error}"
            ) from error

    @property
    def groups(self) -> tuple[hfreduce.ProcessGroupHFReduce, ...]:
        """Groups made so far."""
        return tuple(self._made)

    def group(self, what: str, ranks: Sequence[int]) -> hfreduce.ProcessGroupHFReduce:
        """Makes a group. Collective: these global ranks request equal groups in the same order."""
        book = dist.distributed_c10d
        group, _ = new_process_group(
            *(len(ranks), ranks.index(dist.get_rank()), list(ranks)),
            *(book.Backend("hfreduce"), self._store),
            book.GroupName(f"haiscale-{what}-{self._token}-{'-'.join(map(str, ranks))}"),
            timeout=min(self._limit, MEETING),
            group_desc=f"haiscale {what}",
        )
        assert isinstance(group, hfreduce.ProcessGroupHFReduce)
        group.set_timeout(self._limit)
        world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self._made.append(group)
        return group
