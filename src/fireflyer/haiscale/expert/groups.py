"""Groups of an expert-parallel mesh, and the differentiable exchange of rows inside a group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.elastic.group_creation import GroupFactory
from fireflyer.haiscale.mesh import EXPERT, checked


def expert_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns the expert-parallel dimension of a mesh. Collective if `mesh` is None."""
    if mesh is None:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(EXPERT,))
    if mesh.ndim == 1:
        return mesh
    if EXPERT not in (mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"invalid mesh of {mesh.ndim} dimensions: expected one, or one named '{EXPERT}'"
        )
    return mesh[EXPERT]


class ExpertGroups:
    """Ranks that share experts, their hosts, and the two groups through which a row travels.

    An error in one group aborts all groups, so that no rank waits for a rank that has given up.

    Attributes:
        everyone: all ranks of the mesh.
        rail: ranks with the same place (index among the ranks of a host) as this rank, one per
            host, in the order of hosts.
        node: ranks of this host.
        host_of, place_of: host, and place on that host, by rank of `everyone`.
    """

    def __init__(self, everyone: ProcessGroup) -> None:
        self.everyone = checked(everyone)
        hosts = self.everyone.hosts
        if len({len(ranks) for ranks in hosts}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in hosts)
            raise ConfigError(
                f"expert parallelism needs equal numbers of ranks on all hosts, not {counts}"
            )
        self.host_of = torch.empty(self.everyone.size(), dtype=torch.int64)
        self.place_of = torch.empty_like(self.host_of)
        for host, ranks in enumerate(hosts):
            for place, rank in enumerate(ranks):
                self.host_of[rank], self.place_of[rank] = host, place
        me = self.everyone.rank()
        mine = hosts[int(self.host_of[me])]
        column = [ranks[mine.index(me)] for ranks in hosts]
        with GroupFactory(self.everyone) as founder:
            self.node = founder.group("experts-node", self._named(mine))
            self.rail = founder.group("experts-rail", self._named(column))

    def _named(self, ranks: Sequence[int]) -> list[int]:
        return [dist.get_global_rank(self.everyone, rank) for rank in ranks]

    def run(self, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs a collective; if it fails, aborts all groups and raises the error."""
        try:
            return operation(*args, **options)
        except CollectiveError:
            for group in (self.everyone, self.rail, self.node):
                group.abort()
            raise

    def swap(
        self,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: hfreduce.ProcessGroupHFReduce,
    ) -> torch.Tensor:
        """Sends the first `sent[0]` rows to rank 0, the next `sent[1]` rows to rank 1, and so on.
        Returns the received rows in the order of the sending ranks.

        Collective. Not differentiable.
        """
        if group.size() == 1:
            return rows
        result = rows.new_empty(sum(received), *rows.shape[1:])
        source = rows.contiguous()
        self.run(dist.all_to_all_single, result, source, list(received), list(sent), group=group)
        return result

    def swap_together(
        self,
        tensors: Sequence[torch.Tensor],
        sent: Sequence[list[int]],
        received: Sequence[list[int]],
        group: hfreduce.ProcessGroupHFReduce,
    ) -> list[torch.Tensor]:
        """Performs `swap` for several vectors, with one message per rank. Collective.

        Args:
            tensors: vectors; vectors of floats keep their gradients.
            sent, received: numbers of elements to and from each rank, by vector.
        """
        if group.size() == 1:
            return list(tensors)
        rank_sizes = [
            [
                [count * t.itemsize for count in counts]
                for t, counts in zip(tensors, way, strict=True)
            ]
            for way in (sent, received)
        ]
        pieces = [
            tensor.detach().contiguous().view(torch.uint8).split(sizes)
            for tensor, sizes in zip(tensors, rank_sizes[0], strict=True)
        ]
        out, come = ([sum(each) for each in zip(*sizes, strict=True)] for sizes in rank_sizes)
        message = torch.cat([piece for line in zip(*pieces, strict=True) for piece in line])
        got = self.swap(message, out, come, group)
        cuts = [size for line in zip(*rank_sizes[1], strict=True) for size in line]
        parts = got.split(cuts)
        found = []
        for place, tensor in enumerate(tensors):
            arrived = torch.cat(parts[place :: len(tensors)]).view(tensor.dtype)
            if tensor.requires_grad:
                arrived = _Arrived.apply(  # type: ignore[no-untyped-call]
                    tensor, arrived, self, received[place], sent[place], group
                )
            found.append(arrived)
        return found

    def exchange(
        self,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: hfreduce.ProcessGroupHFReduce,
        wire: torch.dtype | None,
    ) -> torch.Tensor:
        """Performs `swap` differentiably; rows and their gradients travel in the dtype `wire`."""
        if group.size() == 1:
            return rows
        result: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows, self, sent, received, group, wire
        )
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        groups: ExpertGroups,
        sent: list[int],
        received: list[int],
        group: hfreduce.ProcessGroupHFReduce,
        wire: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.way = (groups, received, sent, group, wire)
        return groups.swap(rows.to(wire or rows.dtype), sent, received, group).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups, sent, received, group, wire = ctx.way
        (rows,) = grads
        back = groups.swap(rows.to(wire or rows.dtype), sent, received, group).to(rows.dtype)
        return back, None, None, None, None, None


class _Arrived(torch.autograd.Function):
    """Connects the results of a swap with this rank's inputs, so gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        arrived: torch.Tensor,
        groups: ExpertGroups,
        received: list[int],
        sent: list[int],
        group: hfreduce.ProcessGroupHFReduce,
    ) -> torch.Tensor:
        ctx.way = (groups, received, sent, group)
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups, received, sent, group = ctx.way
        return groups.swap(grads[0], received, sent, group), None, None, None, None, None
