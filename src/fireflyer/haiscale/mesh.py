"""The dimensions of a mesh of ranks, named once for every way of training in parallel."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fireflyer import finalizer, hfreduce
from fireflyer.errors import ConfigError
from fireflyer.haiscale.founding import Founder
from fireflyer.haiscale.refusals import given

PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR = "pp", "dp_replicate", "dp_shard", "ep", "tp"
DIMENSIONS = (PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR)
"""Outermost first: neighbours in the last dimension talk most and belong on one host."""


@dataclass(frozen=True)
class DataLayout:
    """Who shares the parameters of a sharded module with whom. Its own groups end with it: whoever talks in
    them holds it.

    Attributes:
        mesh: (SHARD,) or (REPLICATE, SHARD).
        gather: the ranks that shard together; all-gathers run here.
        reduce: the same ranks in a group of its own, so that no all-gather waits behind a reduction.
        replicate: the ranks with the same shard; None without replicas.
        made: those of the groups that belong to this layout alone.
    """

    mesh: DeviceMesh
    gather: hfreduce.ProcessGroupHFReduce
    reduce: hfreduce.ProcessGroupHFReduce
    replicate: hfreduce.ProcessGroupHFReduce | None
    made: tuple[hfreduce.ProcessGroupHFReduce, ...]

    def __post_init__(self) -> None:
        _end_with(self, self.made)

    def give_back(self) -> None:
        """Destroys the groups of its own. Not collective; what is under way in them ends first."""
        _destroy(self.made)

    def end(self, kept: ProcessGroup | None) -> None:
        """Ends with an error what is under way in its groups, on all ranks: but for `kept` and the default
        group. Not collective."""
        for group in map(checked, self._groups(kept)):
            group.abort()

    def give_up(self, kept: ProcessGroup, ended: bool) -> None:
        """Destroys the groups: those of its own, or with `ended` all that `end` has ended. Not collective."""
        for group in self._groups(kept):
            if ended or group in self.made:
                dist.destroy_process_group(group)

    def _groups(self, kept: ProcessGroup | None) -> list[ProcessGroup]:
        groups = [self.gather, self.reduce, self.replicate]
        spared = (kept, dist.group.WORLD, None)
        return [group for group in groups if group not in spared and _lives(group)]

    @property
    def shards(self) -> int:
        """In how many parts everything is cut."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard(self) -> int:
        """The part of this rank."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate[-1]

    @property
    def holders(self) -> list[list[int]]:
        """The global ranks that hold each part."""
        rows = self.mesh.mesh.reshape(-1, self.shards)
        return [[int(rank) for rank in column] for column in rows.T]

    @property
    def alone(self) -> bool:
        """There is no other rank."""
        return self.mesh.size() == 1


def _lives(group: ProcessGroup | None) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def _destroy(groups: Sequence[ProcessGroup]) -> None:
    for group in filter(_lives, groups):
        dist.destroy_process_group(group)


def _destroy_forgotten(groups: Sequence[ProcessGroup]) -> None:
    with contextlib.suppress(KeyError, ValueError):  # another thread destroys all groups
        _destroy(groups)


def _end_with(holder: object, groups: Sequence[ProcessGroup]) -> None:
    """The groups are destroyed when nobody has the holder any more."""
    finalizer.start()
    weakref.finalize(holder, finalizer.later, _destroy_forgotten, tuple(groups)).atexit = False


def shard_mesh(group: ProcessGroup | None = None) -> DeviceMesh:
    """All ranks of `group` (default: of the default group) in one dimension, SHARD."""
    return DeviceMesh.from_group(checked(group or dist.group.WORLD), "cpu", mesh_dim_names=(SHARD,))


def hybrid_mesh(group: ProcessGroup | None = None) -> DeviceMesh:
    """Ranks of a host shard, hosts replicate: the layout for one network card a host. Collective. Its groups
    end when neither the mesh nor a DTensor on it is there any more.

    One dimension, SHARD, where there is one host or one rank a host.

    Raises:
        ConfigError: another backend than hfreduce, or hosts with different numbers of ranks.
    """
    whole = checked(group or dist.group.WORLD)
    hosts = whole._connection.topology.hosts
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise ConfigError(f"hybrid_mesh needs as many ranks on each host; here they are {counts}")
    if len(hosts) == 1 or sizes == {1}:
        return shard_mesh(whole)
    rows = [[dist.get_global_rank(whole, rank) for rank in ranks] for ranks in hosts]
    me = dist.get_rank()
    (row,) = (ranks for ranks in rows if me in ranks)
    column = [ranks[row.index(me)] for ranks in rows]
    with Founder(whole) as founder:
        groups: list[ProcessGroup] = [founder.group("hybrid", ranks) for ranks in (row, column)]
    mesh = DeviceMesh.from_group(
        groups[::-1], "cpu", mesh=torch.tensor(rows), mesh_dim_names=(REPLICATE, SHARD)
    )
    _end_with(mesh, groups)
    return mesh


def lay_out(mesh: DeviceMesh | None, group: ProcessGroup | None) -> DataLayout:
    """The groups for a mesh of one or two dimensions, or for a group alone. Collective.

    Raises:
        ConfigError: both, another number of dimensions, or another backend than hfreduce.
    """
    if mesh is not None and group is not None:
        raise ConfigError("FullyShardedDataParallel takes mesh= or process_group=, not both")
    mesh = shard_mesh(group) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh={given(mesh)}: a torch DeviceMesh of one or two dimensions is taken, or a function that "
            "makes it, e.g. hybrid_mesh"
        )
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"FullyShardedDataParallel needs a mesh of one dimension (shard) or two (replicate, shard), "
            f"not {mesh.ndim}: slice it, as in mesh['{REPLICATE}', '{SHARD}']"
        )
    if mesh.device_type != "cpu":
        raise ConfigError(
            f"FullyShardedDataParallel needs a mesh of CPUs, not of {mesh.device_type}"
        )
    groups = [checked(mesh.get_group(dimension)) for dimension in range(mesh.ndim)]
    if mesh.mesh_dim_names is None:  # fully_shard tells replicas from shards by names
        mesh = DeviceMesh.from_group(
            [*groups], "cpu", mesh=mesh.mesh, mesh_dim_names=(REPLICATE, SHARD)[-mesh.ndim :]
        )
    with Founder(groups[-1]) as founder:
        reduce = founder.group("reduce", dist.get_process_group_ranks(groups[-1]))
    return DataLayout(
        mesh=mesh,
        gather=groups[-1],
        reduce=reduce,
        replicate=groups[0] if mesh.ndim == 2 else None,
        made=(reduce,),
    )


def lay_out_anew(group: ProcessGroup, shards: int | None) -> DataLayout:
    """A layout for all ranks of a group that works, whatever became of other groups and of torch's store.
    Collective.

    Args:
        shards: so many ranks of a host share a copy of the parameters and others replicate them; one
            dimension where `fits` says no, or None.
    """
    whole = checked(group)
    everyone = dist.get_process_group_ranks(whole)
    with Founder(whole) as founder:
        if shards is None or not fits(whole, shards) or shards == whole.size():
            reduce = founder.group("reduce", everyone)
            return DataLayout(shard_mesh(whole), whole, reduce, None, founder.groups)
        rows = [
            [everyone[rank] for rank in ranks[first : first + shards]]
            for ranks in whole.hosts
            for first in range(0, len(ranks), shards)
        ]
        (row,) = (ranks for ranks in rows if dist.get_rank() in ranks)
        column = [ranks[row.index(dist.get_rank())] for ranks in rows]
        gather, reduce = (founder.group(what, row) for what in ("gather", "reduce"))
        replicate = founder.group("replicate", column)
        mesh = DeviceMesh.from_group(
            [replicate, gather], "cpu", mesh=torch.tensor(rows), mesh_dim_names=(REPLICATE, SHARD)
        )
        return DataLayout(mesh, gather, reduce, replicate, founder.groups)


def fits(group: ProcessGroup, shards: int) -> bool:
    """Whether the ranks of each host can be cut into sets of so many."""
    return shards > 0 and all(len(ranks) % shards == 0 for ranks in checked(group).hosts)


def alone() -> DataLayout:
    """This rank without any other. Not collective."""
    with Founder() as founder:
        gather, reduce = (founder.group(what, [dist.get_rank()]) for what in ("gather", "reduce"))
        return DataLayout(shard_mesh(gather), gather, reduce, None, founder.groups)


@contextlib.contextmanager
def everyone_of(layout: DataLayout) -> Iterator[hfreduce.ProcessGroupHFReduce]:
    """A group of all ranks of the mesh, for a while. Collective."""
    if layout.replicate is None:
        yield layout.gather
        return
    with Founder(checked(layout.gather), checked(layout.replicate)) as founder:
        group = founder.group("everyone", sorted(int(rank) for rank in layout.mesh.mesh.flatten()))
        yield group
        dist.destroy_process_group(group)


def checked(group: ProcessGroup | None) -> hfreduce.ProcessGroupHFReduce:
    if not isinstance(group, hfreduce.ProcessGroupHFReduce):
        raise ConfigError(
            "FullyShardedDataParallel needs process groups of backend 'hfreduce': "
            "init_process_group('hfreduce') or process_group=new_group(backend='hfreduce')"
        )
    return group
