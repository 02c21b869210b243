"""Meshes of ranks, with the same dimension names for all kinds of parallel training."""

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
from fireflyer.haiscale.elastic.group_creation import GroupFactory
from fireflyer.haiscale.validation import given
from fireflyer.torch_internals.distributed import world

PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR = "pp", "dp_replicate", "dp_shard", "ep", "tp"
DIMENSIONS = (PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR)
"""Dimensions, outermost first. Neighbours in the last dimensions communicate most: keep them on one
host."""


@dataclass(frozen=True)
class DataLayout:
    """Groups over which a sharded module's parameters are distributed.

    The layout's own groups end with the layout, so every user of these groups must hold the layout.

    Attributes:
        mesh: (SHARD,) or (REPLICATE, SHARD).
        gather: ranks that shard together; all-gathers run here.
        reduce: the same ranks in a separate group, so that no all-gather waits behind a reduction.
        replicate: ranks with the same shard; None without replicas.
        made: the layout's own groups.
    """

    mesh: DeviceMesh
    gather: hfreduce.ProcessGroupHFReduce
    reduce: hfreduce.ProcessGroupHFReduce
    replicate: hfreduce.ProcessGroupHFReduce | None
    made: tuple[hfreduce.ProcessGroupHFReduce, ...]

    def __post_init__(self) -> None:
        _end_with(self, self.made)

    def give_back(self) -> None:
        """Destroys the layout's own groups after operations in flight have ended. Not
        collective."""
        _destroy(self.made)

    def end(self, kept: ProcessGroup | None) -> None:
        """Ends operations in flight in the layout's groups with an error, on all ranks. Not
        collective.

        `kept` and the default group are spared.
        """
        for group in map(checked, self._groups(kept)):
            group.abort()

    def give_up(self, kept: ProcessGroup, ended: bool) -> None:
        """Destroys the layout's own groups; if `ended` is True, also the other groups that `end`
        has ended. Not collective."""
        for group in self._groups(kept):
            if ended or group in self.made:
                dist.destroy_process_group(group)

    def _groups(self, kept: ProcessGroup | None) -> list[ProcessGroup]:
        groups = [self.gather, self.reduce, self.replicate]
        spared = (kept, dist.group.WORLD, None)
        return [group for group in groups if group not in spared and _lives(group)]

    @property
    def shards(self) -> int:
        """Number of parts into which each parameter is cut."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard(self) -> int:
        """Index of this rank's part."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate[-1]

    @property
    def holders(self) -> list[list[int]]:
        """Global ranks that hold each part."""
        rows = self.mesh.mesh.reshape(-1, self.shards)
        return [[int(rank) for rank in column] for column in rows.T]

    @property
    def alone(self) -> bool:
        """True if there is no other rank."""
        return self.mesh.size() == 1


def _lives(group: ProcessGroup | None) -> bool:
    return group in world.pg_map


def _destroy(groups: Sequence[ProcessGroup]) -> None:
    for group in filter(_lives, groups):
        dist.destroy_process_group(group)


def _destroy_forgotten(groups: Sequence[ProcessGroup]) -> None:
    with contextlib.suppress(KeyError, ValueError):  # another thread destroys all groups
        _destroy(groups)


def _end_with(holder: object, groups: Sequence[ProcessGroup]) -> None:
    """Destroys the groups once the holder is garbage-collected."""
    finalizer.start()
    weakref.finalize(holder, finalizer.later, _destroy_forgotten, tuple(groups)).atexit = False


def shard_mesh(group: ProcessGroup | None = None) -> DeviceMesh:
    """Returns all ranks of `group` (default: the default group) in one dimension, SHARD."""
    return DeviceMesh.from_group(checked(group or dist.group.WORLD), "cpu", mesh_dim_names=(SHARD,))


def hybrid_mesh(group: ProcessGroup | None = None) -> DeviceMesh:
    """Returns a mesh that shards inside hosts and replicates between them. Collective.

    This layout suits one network card per host. The mesh's groups end once neither the mesh nor a
    DTensor on it exists. With one host, or one rank per host, the mesh has one dimension, SHARD.

    Raises:
        ConfigError: the backend is not hfreduce, or hosts have different numbers of ranks.
    """
    whole = checked(group or dist.group.WORLD)
    hosts = whole._connection.topology.hosts
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise ConfigError(f"hybrid_mesh needs equal numbers of ranks on all hosts, not {counts}")
    if len(hosts) == 1 or sizes == {1}:
        return shard_mesh(whole)
    rows = [[dist.get_global_rank(whole, rank) for rank in ranks] for ranks in hosts]
    me = dist.get_rank()
    (row,) = (ranks for ranks in rows if me in ranks)
    column = [ranks[row.index(me)] for ranks in rows]
    with GroupFactory(whole) as founder:
        groups: list[ProcessGroup] = [founder.group("hybrid", ranks) for ranks in (row, column)]
    mesh = DeviceMesh.from_group(
        groups[::-1], "cpu", mesh=torch.tensor(rows), mesh_dim_names=(REPLICATE, SHARD)
    )
    _end_with(mesh, groups)
    return mesh


def lay_out(mesh: DeviceMesh | None, group: ProcessGroup | None) -> DataLayout:
    """Makes the groups for a mesh of one or two dimensions, or for `group` if `mesh` is None.
    Collective.

    Raises:
        ConfigError: both are given, the mesh has another number of dimensions, or the backend is
            not hfreduce.
    """
    if mesh is not None and group is not None:
        raise ConfigError("FullyShardedDataParallel takes mesh= or process_group=, not both")
    mesh = shard_mesh(group) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"invalid mesh {given(mesh)}: expected a torch DeviceMesh of one or two dimensions, or a "
            "function that makes it, e.g. hybrid_mesh"
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
    if mesh.mesh_dim_names is None:  # fully_shard distinguishes replicas and shards by name
        mesh = DeviceMesh.from_group(
            [*groups], "cpu", mesh=mesh.mesh, mesh_dim_names=(REPLICATE, SHARD)[-mesh.ndim :]
        )
    with GroupFactory(groups[-1]) as founder:
        reduce = founder.group("reduce", dist.get_process_group_ranks(groups[-1]))
    return DataLayout(
        mesh=mesh,
        gather=groups[-1],
        reduce=reduce,
        replicate=groups[0] if mesh.ndim == 2 else None,
        made=(reduce,),
    )


def lay_out_anew(group: ProcessGroup, shards: int | None) -> DataLayout:
    """Makes a layout for all ranks of a working group. Collective.

    The function also works if other groups or torch's store have failed.

    Args:
        shards: number of ranks of a host that share a copy of the parameters; other ranks replicate
        the copy. The layout has one dimension if `shards` is None or `fits` returns False.
    """
    whole = checked(group)
    everyone = dist.get_process_group_ranks(whole)
    with GroupFactory(whole) as founder:
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
    """Returns True if the ranks of each host can be divided into sets of `shards` ranks."""
    return shards > 0 and all(len(ranks) % shards == 0 for ranks in checked(group).hosts)


def alone() -> DataLayout:
    """Makes a layout of this rank alone. Not collective."""
    with GroupFactory() as founder:
        gather, reduce = (founder.group(what, [dist.get_rank()]) for what in ("gather", "reduce"))
        return DataLayout(shard_mesh(gather), gather, reduce, None, founder.groups)


@contextlib.contextmanager
def everyone_of(layout: DataLayout) -> Iterator[hfreduce.ProcessGroupHFReduce]:
    """Provides a temporary group of all ranks of the layout. Collective."""
    if layout.replicate is None:
        yield layout.gather
        return
    with GroupFactory(checked(layout.gather), checked(layout.replicate)) as founder:
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
