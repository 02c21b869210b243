"""Moves the values of a sharded model from one layout to another, from memory to memory.

Every rank reports the part that it holds, and how many optimizer steps that part has taken. The
ranks with the most steps are the sources. Rows go directly from a source to their new holder, one
unit at a time. No rank receives rows that it will not hold.

A part consists of ceil(rows / shards) rows of the first dimension, as in `fully_shard` and
`Shard(0)`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.errors import ConfigError, ShardsLost
from fireflyer.haiscale.consistency import tell_all
from fireflyer.haiscale.mesh import DataLayout

Rows = tuple[int, int]
"""Range of rows: the first row, and the row after the last."""


@dataclass(frozen=True)
class Part:
    """The part of the model's values that one rank holds.

    Attributes:
        shards, shard: number of parts, and index of this part.
        holders: global ranks that held each part when the parts were made.
    """

    shards: int
    shard: int
    holders: list[list[int]]

    @classmethod
    def of(cls, layout: DataLayout) -> "Part":
        return cls(layout.shards, layout.shard, layout.holders)

    def rows(self, count: int) -> Rows:
        """Returns the rows of this part in a tensor with `count` rows."""
        return rows_of(count, self.shards, self.shard)


def rows_of(count: int, shards: int, shard: int) -> Rows:
    size = -(-count // shards)
    return min(count, shard * size), min(count, (shard + 1) * size)


@dataclass(frozen=True)
class Claim:
    """Report of a rank about itself.

    Attributes:
        part: part that the rank holds; None if the rank has just joined.
        steps: number of optimizer steps that the part's values have taken; None if the values are
            not valid.
        wanted: number of shards that each replica of the model is to have; None without replicas.
        groups: digest of the optimizers' param_groups.
        structure: digest of the optimizers' state, without values.
        values: True if the rank wants values to move.
    """

    part: Part | None
    steps: int | None
    wanted: int | None
    groups: str
    structure: str
    values: bool


@dataclass(frozen=True)
class Source:
    """Ranks of the group that hold the same part."""

    part: Part
    ranks: list[int]


class Plan:
    """Holders of the parts, and the leader; equal on all ranks.

    The leader is the first rank with valid values. If no rank has valid values or no values move,
    the leader is the first rank that has a part.
    """

    def __init__(self, claims: Sequence[Claim], hosts: Sequence[Sequence[int]]) -> None:
        if len({claim.values for claim in claims}) > 1:
            raise ConfigError("reshard: values= must be equal on all ranks")
        if len({claim.groups for claim in claims}) > 1:
            raise ConfigError("reshard: the optimizers of the ranks have different param_groups")
        self.values = claims[0].values
        self.claims = list(claims)
        stayed = [rank for rank, claim in enumerate(claims) if claim.part is not None]
        if not stayed:
            raise ConfigError("reshard: all ranks are new, and no rank has a model to share")
        self.newest = max((claims[r].steps or 0 for r in stayed), default=0)
        valid = [rank for rank in stayed if claims[rank].steps == self.newest]
        self.lead = (valid or stayed)[0] if self.values else stayed[0]
        full = valid if self.values else stayed
        self.behind = [rank not in full for rank in range(len(claims))]
        self.wanted = claims[self.lead].wanted
        self.sources: list[Source] = []
        for rank in valid:
            part = claims[rank].part
            assert part is not None
            same = next((s for s in self.sources if s.part == part), None)
            if same is None:
                self.sources.append(Source(part, [rank]))
            else:
                same.ranks.append(rank)
        self._host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        if self.values and len({claims[rank].structure for rank in valid}) > 1:
            raise ConfigError("reshard: the optimizers of the ranks keep different state")

    @classmethod
    def agree(cls, claim: Claim, group: hfreduce.ProcessGroupHFReduce) -> "Plan":
        """Exchanges claims. Collective. Raises ConfigError on all ranks if claims disagree."""
        said = tell_all(asdict(claim), group)
        parts = [words.pop("part") for words in said]
        claims = [
            Claim(part and Part(**part), **words) for part, words in zip(parts, said, strict=True)
        ]
        return cls(claims, group.hosts)

    def check(self, rows: Mapping[str, int]) -> None:
        """Raises ShardsLost unless all rows of each parameter are in some source's memory.

        Args:
            rows: number of rows of each parameter.
        """
        missing = {name: self._gaps(count) for name, count in rows.items()}
        lost = [name for name, gaps in missing.items() if gaps]
        if not lost:
            return
        stayed = [claim.part for claim in self.claims if claim.part is not None]
        known = self.sources[0].part if self.sources else stayed[0]
        ranks = set()
        for name in lost:
            for shard, holders in enumerate(known.holders):
                first, end = rows_of(rows[name], known.shards, shard)
                if any(first < gap[1] and gap[0] < end for gap in missing[name]):
                    ranks.update(holders)
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ShardsLost(
            f"parts of {', '.join(lost[:5])}{more} were only in the memory of former ranks "
            f"{', '.join(map(str, sorted(ranks)))}: reshard with values=False and load a checkpoint",
            lost,
            sorted(ranks),
        )

    def _gaps(self, count: int) -> list[Rows]:
        held = sorted(source.part.rows(count) for source in self.sources)
        gaps, begin = [], 0
        for first, end in [*held, (count, count)]:
            if first > begin:
                gaps.append((begin, first))
            begin = max(begin, end)
        return gaps

    def deliveries(self, count: int, wanted: Rows, rank: int) -> Iterator[tuple[int, Rows]]:
        """Yields pairs (source rank, rows) that together deliver the rows `wanted` to `rank`.

        Sources are `rank` itself if possible, else a rank on the same host, else any rank.
        """
        begin, end = wanted
        while begin < end:
            _, choice, last = min(self._holding(count, begin, rank))
            yield choice, (begin, min(last, end))
            begin = last

    def _holding(self, count: int, row: int, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yields (distance, source rank, end of the source's rows) for ranks that hold `row`.

        The distance from `rank` to a source is 0 for `rank` itself, 1 on the same host, else 2.
        """
        for source in self.sources:
            first, end = source.part.rows(count)
            if not first <= row < end:
                continue
            if rank in source.ranks:
                yield 0, rank, end
            near = [r for r in source.ranks if self._host[r] == self._host[rank]]
            for distance, ranks in ((1, near), (2, source.ranks)):
                if ranks:
                    yield distance, ranks[rank % len(ranks)], end


@dataclass
class Piece:
    """Tensor to move.

    Attributes:
        count: number of the tensor's rows, in all parts.
        old: this rank's part in the old layout; None if this rank has no valid part.
        new: receives this rank's part in the new layout.
    """

    count: int
    old: torch.Tensor | None
    new: torch.Tensor


class Mover:
    """Moves rows over `group` to new parts. All ranks move the same tensors in the same order.

    Attributes:
        shards, shard: number of new parts, and index of the part that this rank will hold.
        behind: True if this rank has no valid values.
        received: bytes that other ranks have sent to this rank.
    """

    def __init__(
        self, plan: Plan, group: hfreduce.ProcessGroupHFReduce, layout: DataLayout
    ) -> None:
        self._plan, self._group = plan, group
        self.shards, self.shard = layout.shards, layout.shard
        places = {rank: part for part, ranks in enumerate(layout.holders) for rank in ranks}
        everyone = dist.get_process_group_ranks(group)
        self._part = [places[rank] for rank in everyone]
        self._rank = group.rank()
        self.behind = plan.behind[self._rank]
        self._own = None if self.behind else plan.claims[self._rank].part
        self.received = 0
        self._routes: Callable[[int], list[list[tuple[int, Rows]]]] = functools.cache(self._route)

    def _route(self, count: int) -> list[list[tuple[int, Rows]]]:
        """Returns, for each rank, the sources and rows of its deliveries."""
        wanted = [rows_of(count, self.shards, part) for part in self._part]
        return [list(self._plan.deliveries(count, rows, rank)) for rank, rows in enumerate(wanted)]

    def move(self, pieces: Sequence[Piece]) -> None:
        """Moves tensors to their new parts. Collective."""
        world = self._group.size()
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(world)]
        incoming: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for piece in pieces:
            begin = rows_of(piece.count, self.shards, self.shard)[0]
            for rank, deliveries in enumerate(self._routes(piece.count)):
                for source, (first, end) in deliveries:
                    if rank == self._rank:
                        incoming[source].append(piece.new[first - begin : end - begin])
                    if source == self._rank:
                        outgoing[rank].append(self._held(piece, first, end))
        sent = [_packed(tensors) for tensors in outgoing]
        got = [hfreduce.empty(_bytes(tensors), dtype=torch.uint8) for tensors in incoming]
        dist.all_to_all(got, sent, self._group)
        for rank, (tensors, block) in enumerate(zip(incoming, got, strict=True)):
            _unpack(block, tensors)
            self.received += block.numel() if rank != self._rank else 0

    def _held(self, piece: Piece, first: int, end: int) -> torch.Tensor:
        assert self._own is not None
        assert piece.old is not None
        begin = self._own.rows(piece.count)[0]
        return piece.old[first - begin : end - begin]

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the leader's values of `tensors` to the ranks without valid values. Collective."""
        if not any(self._plan.behind) or not tensors:
            return
        block = hfreduce.empty(_bytes(tensors), dtype=torch.uint8)
        if self._rank == self._plan.lead:
            block.copy_(_packed(tensors))
        root = dist.get_global_rank(self._group, self._plan.lead)
        dist.broadcast(block, root, self._group)
        if self.behind:
            _unpack(block, tensors)
            self.received += block.numel()

    def from_lead(self, words: Callable[[], Any]) -> Any:
        """Returns the result of `words()` on the leader, or None if all ranks have valid values.

        Collective.
        """
        if not any(self._plan.behind):
            return None
        mine = words() if self._rank == self._plan.lead else None
        return tell_all(mine, self._group)[self._plan.lead]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    block = hfreduce.empty(_bytes(tensors), dtype=torch.uint8)
    for tensor, piece in zip(tensors, block.split([t.nbytes for t in tensors]), strict=True):
        piece.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return block


def _unpack(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for tensor, piece in zip(tensors, block.split([t.nbytes for t in tensors]), strict=True):
        tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
