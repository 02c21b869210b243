"""`parallelize`: replaces layers of a module, chosen by name, by tensor-parallel layers."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fireflyer.errors import ConfigError
from fireflyer.haiscale.consistency import check_alike, copy_from_first, tell_all
from fireflyer.haiscale.mesh import TENSOR
from fireflyer.haiscale.tensor.exchanges import piece_of
from fireflyer.haiscale.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    sum_gradients,
)
from fireflyer.haiscale.validation import given


@dataclass(frozen=True)
class Column:
    """Linear layer split by output features.

    Attributes:
        gather: join the outputs; otherwise each rank returns its features.
        sequence: the input is split along the sequence.
    """

    gather: bool = False
    sequence: bool = False


@dataclass(frozen=True)
class Row:
    """Linear layer split by input features.

    Attributes:
        scatter: the input has all features; otherwise it is the output of a Column layer.
        sequence: leave the output split along the sequence.
    """

    scatter: bool = False
    sequence: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Embedding split by rows.

    Attributes:
        sequence: leave the output split along the sequence.
    """

    sequence: bool = False


@dataclass(frozen=True)
class Sequence:
    """Layer with whole parameters that sees pieces of the sequence, for example a norm."""


Style = Column | Row | Vocabulary | Sequence
_KINDS: dict[type, tuple[type[nn.Module], str, int]] = {
    Column: (nn.Linear, "out_features", 0),
    Row: (nn.Linear, "in_features", 1),
    Vocabulary: (nn.Embedding, "num_embeddings", 0),
}


def parallelize(
    module: nn.Module, plan: Mapping[str, Style], mesh: DeviceMesh | None = None
) -> nn.Module:
    """Splits layers of `module` over the ranks of a mesh, in place. Collective.

    Parameters and buffers are first copied from the mesh's first rank. Make optimizers and
    data-parallel wrappers afterwards.

    Args:
        plan: styles by pattern. A pattern is a module's name; `*` in it stands for any text between
            two dots.
        mesh: ranks that share the layers: one dimension, or several with one named "tp". Default:
            all ranks.

    Returns:
        `module`.

    Raises:
        ConfigError: on all ranks, if a pattern names no module or a style does not fit its module.
            Also if the number of ranks does not divide a layer's features or rows, or if modules or
            plans differ between ranks.
    """
    mesh = tensor_mesh(mesh)
    group = mesh.get_group()
    chosen: dict[str, Style] = {}
    try:
        chosen = _chosen(module, plan, mesh.size())
        fault = ""
    except ConfigError as error:
        fault = str(error)
    faults = tell_all(fault, group)
    for rank, said in enumerate(faults):
        if said:
            raise ConfigError(said if all(f == said for f in faults) else f"rank {rank}: {said}")
    check_alike(module, group, {f"plan[{name!r}]": style for name, style in chosen.items()})
    copy_from_first((*module.parameters(), *module.buffers()), group)
    _replace(module, chosen, mesh)
    return module


def tensor_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns the tensor-parallel dimension of a mesh. Collective if `mesh` is None."""
    if mesh is None:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(TENSOR,))
    if mesh.ndim == 1:
        return mesh
    if TENSOR not in (mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"invalid mesh of {mesh.ndim} dimensions: expected one, or one named '{TENSOR}'"
        )
    return mesh[TENSOR]


def _chosen(module: nn.Module, plan: Mapping[str, Style], ranks: int) -> dict[str, Style]:
    """Returns the style of each module that the plan names."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    chosen: dict[str, Style] = {}
    if not isinstance(plan, Mapping):
        raise ConfigError(f"invalid plan {given(plan)}: expected a dict of styles by pattern")
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise ConfigError(
                f"invalid style {given(style)} for {pattern!r}: expected Column, Row, Vocabulary "
                "or Sequence"
            )
        found = [name for name in names if _matches(name, pattern)]
        if not found:
            raise ConfigError(f"the plan's pattern {pattern!r} names no module")
        for name in found:
            if name in chosen:
                raise ConfigError(f"two patterns of the plan name module {name!r}")
            _check(name, module.get_submodule(name), style, ranks)
            chosen[name] = style
    return chosen


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _check(name: str, part: nn.Module, style: Style, ranks: int) -> None:
    if isinstance(style, Sequence):
        return
    kind, counted, _ = _KINDS[type(style)]
    if type(part) is not kind:
        raise ConfigError(
            f"{type(style).__name__} does not fit {name}: expected nn.{kind.__name__}, "
            f"not {type(part).__name__}"
        )
    if (count := getattr(part, counted)) % ranks:
        raise ConfigError(f"{ranks} ranks do not divide the {count} {counted} of {name}")
    if isinstance(part, nn.Embedding) and (part.max_norm or part.sparse or part.scale_grad_by_freq):
        raise ConfigError(
            f"{name} has max_norm, sparse or scale_grad_by_freq, which a split embedding does not support"
        )


def _replace(module: nn.Module, chosen: Mapping[str, Style], mesh: DeviceMesh) -> None:
    pieces: dict[tuple[int, int], nn.Parameter] = {}
    whole: list[nn.Parameter] = []  # kept alive, so that no id is used again

    def cut(parameter: nn.Parameter, dim: int) -> nn.Parameter:
        key = (id(parameter), dim)
        if key not in pieces:
            whole.append(parameter)
            piece = piece_of(parameter.detach(), dim, mesh.get_local_rank(), mesh.size())
            pieces[key] = nn.Parameter(piece.clone(), parameter.requires_grad)
        return pieces[key]

    made: dict[int, nn.Module] = {}
    old: list[nn.Module] = []
    for name, style in chosen.items():
        part: Any = module.get_submodule(name)
        if id(part) not in made:
            old.append(part)
            made[id(part)] = _layer(part, style, mesh, cut)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, made[id(part)])


def _layer(part: Any, style: Style, mesh: DeviceMesh, cut: Any) -> nn.Module:
    match style:
        case Column():
            return ColumnParallelLinear(part, mesh, cut, style.gather, style.sequence)
        case Row():
            return RowParallelLinear(part, mesh, cut, style.scatter, style.sequence)
        case Vocabulary():
            return VocabParallelEmbedding(part, mesh, cut, style.sequence)
    for parameter in part.parameters():
        sum_gradients(parameter, mesh.get_group())
    assert isinstance(part, nn.Module)
    return part
