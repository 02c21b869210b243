"""The dimensions of a mesh of ranks, named once for every way of training in parallel."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fireflyer import hfreduce
from fireflyer.errors import ConfigError

PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR = "pp", "dp_replicate", "dp_shard", "ep", "tp"
DIMENSIONS = (PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR)
"""Outermost first: neighbours in the last dimension talk most and belong on one host."""


@dataclass(frozen=True)
class DataLayout:
    """Who shares the parameters of a sharded module with whom.

    Attributes:
        mesh: (SHARD,) or (REPLICATE, SHARD).
        gather: the ranks that shard together; all-gathers run here.
        reduce: the same ranks in a group of its own, so that no all-gather waits behind a reduction.
        replicate: the ranks with the same shard; None without replicas.
    """

    mesh: DeviceMesh
    gather: hfreduce.ProcessGroupHFReduce
    reduce: hfreduce.ProcessGroupHFReduce
    replicate: hfreduce.ProcessGroupHFReduce | None

    @property
    def alone(self) -> bool:
        """There is no other rank."""
        return self.mesh.size() == 1


def shard_mesh(group: ProcessGroup | None = None) -> DeviceMesh:
    """All ranks of `group` (default: of the default group) in one dimension, SHARD."""
    return DeviceMesh.from_group(
        _checked(group or dist.group.WORLD), "cpu", mesh_dim_names=(SHARD,)
    )


def hybrid_mesh(group: ProcessGroup | None = None) -> DeviceMesh:
    """Ranks of a host shard, hosts replicate: the layout for one network card a host. Collective.

    One dimension, SHARD, where there is one host or one rank a host.

    Raises:
        ConfigError: another backend than hfreduce, or hosts with different numbers of ranks.
    """
    whole = _checked(group or dist.group.WORLD)
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
    groups: list[ProcessGroup] = [_new_group(ranks) for ranks in (row, column)]
    return DeviceMesh.from_group(
        groups[::-1], "cpu", mesh=torch.tensor(rows), mesh_dim_names=(REPLICATE, SHARD)
    )


def lay_out(mesh: DeviceMesh | None, group: ProcessGroup | None) -> DataLayout:
    """The groups for a mesh of one or two dimensions, or for a group alone. Collective.

    Raises:
        ConfigError: both, another number of dimensions, or another backend than hfreduce.
    """
    if mesh is not None and group is not None:
        raise ConfigError("FullyShardedDataParallel takes mesh= or process_group=, not both")
    mesh = mesh or shard_mesh(group)
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"FullyShardedDataParallel needs a mesh of one dimension (shard) or two (replicate, shard), "
            f"not {mesh.ndim}: slice it, as in mesh['{REPLICATE}', '{SHARD}']"
        )
    if mesh.device_type != "cpu":
        raise ConfigError(
            f"FullyShardedDataParallel needs a mesh of CPUs, not of {mesh.device_type}"
        )
    groups = [_checked(mesh.get_group(dimension)) for dimension in range(mesh.ndim)]
    return DataLayout(
        mesh=mesh,
        gather=groups[-1],
        reduce=_new_group(dist.get_process_group_ranks(groups[-1])),
        replicate=groups[0] if mesh.ndim == 2 else None,
    )


@contextlib.contextmanager
def everyone_of(layout: DataLayout) -> Iterator[hfreduce.ProcessGroupHFReduce]:
    """A group of all ranks of the mesh, for a while. Collective."""
    if layout.replicate is None:
        yield layout.gather
        return
    group = _new_group(sorted(int(rank) for rank in layout.mesh.mesh.flatten()))
    yield group
    dist.destroy_process_group(group)


def _new_group(ranks: Sequence[int]) -> hfreduce.ProcessGroupHFReduce:
    group = dist.new_group(list(ranks), backend="hfreduce", use_local_synchronization=True)
    assert isinstance(group, hfreduce.ProcessGroupHFReduce)
    return group


def _checked(group: ProcessGroup | None) -> hfreduce.ProcessGroupHFReduce:
    if not isinstance(group, hfreduce.ProcessGroupHFReduce):
        raise ConfigError(
            "FullyShardedDataParallel needs process groups of backend 'hfreduce': "
            "init_process_group('hfreduce') or process_group=new_group(backend='hfreduce')"
        )
    return group
