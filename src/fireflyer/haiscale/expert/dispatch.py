"""Dispatch of tokens to experts, and combination of the results: a token goes once to each host.

A token crosses the network once for each host that has one of its experts. The receiver is the rank
that has the same index among the ranks of its host as the sender. The receiver forwards the token
once to each rank of its host that needs it. On the way back, each host sums the results of a token
and sends one row.
"""

from dataclasses import dataclass

import torch

from fireflyer import hfreduce
from fireflyer.haiscale.expert.groups import ExpertGroups


@dataclass(frozen=True)
class Pairs:
    """Choices of a router: pair i sends a row to a slot, and the slot's result counts with a
    weight.

    Attributes:
        row: (pairs,) row of the tokens, ascending.
        slot: (pairs,) physical slot of the expert.
        weight: (pairs,) factor of the result.
    """

    row: torch.Tensor
    slot: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class _Hop:
    """One exchange of rows, with the data that its way back needs.

    Attributes:
        rows: number of rows before the exchange.
        taken: for each sent row, its index among the rows before the exchange.
        sent, received: number of rows to and from each rank.
    """

    group: hfreduce.ProcessGroupHFReduce
    rows: int
    taken: torch.Tensor
    sent: list[int]
    received: list[int]
    wire: torch.dtype | None


class Dispatcher:
    """Sends rows to the ranks of their experts, and results back.

    Args:
        groups: ranks that share the experts.
        slots: number of physical slots of each rank.
        wire: dtype of rows between hosts; None keeps the rows' dtype.
    """

    def __init__(self, groups: ExpertGroups, slots: int, wire: torch.dtype | None) -> None:
        self._groups, self._slots, self._wire = groups, slots, wire

    def dispatch(
        self, x: torch.Tensor, pairs: Pairs
    ) -> tuple[torch.Tensor, Pairs, tuple[_Hop, ...]]:
        """Returns the rows that this rank's experts need, their pairs, and the way back.

        Collective, and so is the backward.

        Args:
            x: (tokens, features); a rank may have no tokens.
            pairs: at most 255 pairs per token.
        """
        groups = self._groups
        hosts = groups.host_of[pairs.slot // self._slots]
        x, pairs, first = self._hop(x, pairs, hosts, groups.rail, self._wire)
        places = groups.place_of[pairs.slot // self._slots]
        x, pairs, second = self._hop(x, pairs, places, groups.node, None)
        return x, pairs, (first, second)

    def combine(self, results: torch.Tensor, way: tuple[_Hop, ...]) -> torch.Tensor:
        """Returns the sum of each token's results, (tokens, features). Collective.

        Args:
            results: one row for each row that `dispatch` returned.
            way: the way back that `dispatch` returned.
        """
        for hop in reversed(way):
            rows = self._groups.exchange(results, hop.received, hop.sent, hop.group, hop.wire)
            total = rows.new_zeros(hop.rows, rows.shape[1])
            results = total.index_add(0, hop.taken, rows)
        return results

    def _hop(
        self,
        x: torch.Tensor,
        pairs: Pairs,
        targets: torch.Tensor,
        group: hfreduce.ProcessGroupHFReduce,
        wire: torch.dtype | None,
    ) -> tuple[torch.Tensor, Pairs, _Hop]:
        """Sends each row once to every rank of `group` that is the target of one of the row's
        pairs."""
        groups, size = self._groups, group.size()
        keys, order = torch.sort(targets * len(x) + pairs.row, stable=True)
        rows, per_row = torch.unique_consecutive(keys, return_counts=True)
        to, taken = rows // max(1, len(x)), rows % max(1, len(x))
        # (ranks, 2): numbers of rows and pairs for each rank.
        sizes = torch.stack([torch.bincount(at, minlength=size) for at in (to, targets)], 1)
        one = [1] * size
        heard = groups.swap(sizes.int(), one, one, group).tolist()
        sent, sent_pairs = sizes.T.tolist()
        received, received_pairs = ([line[n] for line in heard] for n in (0, 1))
        counts, slots, weights = groups.swap_together(
            (per_row.to(torch.uint8), pairs.slot[order].to(torch.int16), pairs.weight[order]),
            (sent, sent_pairs, sent_pairs),
            (received, received_pairs, received_pairs),
            group,
        )
        moved = groups.exchange(x.index_select(0, taken), sent, received, group, wire)
        row = torch.repeat_interleave(torch.arange(len(moved)), counts.long())
        way = _Hop(group, len(x), taken, sent, received, wire)
        return moved, Pairs(row, slots.long(), weights), way
