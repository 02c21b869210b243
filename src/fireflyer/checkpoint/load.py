"""Loading: one generation read, verified and put together; the ranks agree on which."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fireflyer._native import crc32
from fireflyer.checkpoint.catalog import Catalog
from fireflyer.checkpoint.manifest import Generation, Manifest
from fireflyer.checkpoint.ranks import exchange, from_first, rank_and_world
from fireflyer.checkpoint.staging import leaf_bytes
from fireflyer.checkpoint.tree import (
    Leaf,
    Node,
    Path,
    Tensor,
    empty_leaf,
    flatten,
    leaf_dtype,
    leaf_kind,
    path_name,
    unflatten,
)
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.log import get_logger

_log = get_logger("checkpoint")
_GOOD, _GONE, _DAMAGED, _FAILED = range(4)


class Loaded:
    """What `load_newest` found."""

    def __init__(self, generation: Generation, state: Any, per_rank: Any | None) -> None:
        self.generation = generation
        self.state = state
        self.per_rank = per_rank


def load_newest(catalog: Catalog, step: int | None, into: Any | None) -> Loaded:
    """The newest good checkpoint (of `step`, if given); collective where there are several ranks.

    Rank 0 picks, all ranks read and verify, and one rank's finding is every rank's: a checkpoint
    that any rank finds damaged is set aside by rank 0, and the next older one is tried.

    Raises:
        CheckpointError: if none is good, or `into` does not fit, on every rank.
        StorageError: if this rank cannot read the directory; the other ranks get a CheckpointError.
    """
    targets = {} if into is None else _targets(into)
    skipped: set[Generation] = set()
    while True:
        generation = _pick(catalog, step, skipped)
        finding, loaded = _GOOD, None
        error: CheckpointError | StorageError | None = None
        try:
            loaded = _read(catalog, generation, targets)
        except (CheckpointError, StorageError) as failure:
            finding, error = _judge(catalog, generation, failure), failure
        findings = [row[0] for row in exchange([finding])]
        if _FAILED in findings:
            rank = findings.index(_FAILED)
            message = f"rank {rank} could not load step {generation.step}; its own error says why"
            raise error if error is not None and finding == _FAILED else CheckpointError(message)
        if loaded is not None and max(findings) == _GOOD:
            return loaded
        skipped.add(generation)
        if _DAMAGED in findings:
            _skip(catalog, generation, findings.index(_DAMAGED), error)


def _judge(
    catalog: Catalog, generation: Generation, failure: CheckpointError | StorageError
) -> int:
    """What a failure to read a checkpoint says about it. A run that saves may have retired it meanwhile."""
    try:
        if catalog.storage.size(generation.manifest) is None:
            return _GONE
    except StorageError:
        return _FAILED
    return _DAMAGED if isinstance(failure, Corrupted) else _FAILED


def _pick(catalog: Catalog, step: int | None, skipped: set[Generation]) -> Generation:
    """Rank 0's choice on every rank."""
    rank, _ = rank_and_world()
    choice: list[int] = [0, 0, 0]
    failure: StorageError | None = None
    if rank == 0:
        try:
            left = [
                generation for generation in catalog.generations(step) if generation not in skipped
            ]
            if left:
                choice = [left[0].epoch, left[0].number, left[0].step]
        except StorageError as error:
            failure, choice = error, [-1, 0, 0]
    choice = from_first(choice)
    if failure is not None:
        raise failure
    if choice[0] < 0:
        raise CheckpointError("rank 0 could not list the checkpoints; its own error says why")
    if choice[0] == 0:
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        damaged = (
            f"; {len(skipped)} damaged: see the warnings and {catalog.storage}/damaged"
            if skipped
            else ""
        )
        raise CheckpointError(f"there is no good {what} in {catalog.storage}{damaged}")
    return Generation(*choice)


def _skip(catalog: Catalog, generation: Generation, finder: int, damage: Exception | None) -> None:
    rank, _ = rank_and_world()
    if rank == finder:
        _log.warning(
            "the checkpoint of step %d is damaged: %s; moving it to %s/damaged, trying the next older one",
            generation.step,
            damage,
            catalog.storage,
        )
    if rank == 0:
        catalog.set_aside(generation)


def _read(catalog: Catalog, generation: Generation, targets: dict[Path, Leaf]) -> Loaded:
    manifest = catalog.manifest(generation)
    _check_fit(manifest, targets)
    rank, _ = rank_and_world()
    state = _read_tree(catalog, generation, manifest.state, targets)
    own = manifest.per_rank.get(str(rank))
    return Loaded(
        generation, state, None if own is None else _read_tree(catalog, generation, own, {})
    )


def _read_tree(
    catalog: Catalog, generation: Generation, nodes: Sequence[Node], targets: dict[Path, Leaf]
) -> Any:
    leaves: dict[Path, Leaf] = {}
    for node in nodes:
        if isinstance(node, Tensor):
            target = targets.get(node.path)
            direct = target if target is not None and _is_plain(target) else empty_leaf(node)
            _read_tensor(catalog, generation, node, direct)
            if target is not None and direct is not target:
                _copy(direct, target)
            leaves[node.path] = direct if target is None else target
    return unflatten(nodes, leaves)


def _read_tensor(catalog: Catalog, generation: Generation, node: Tensor, leaf: Leaf) -> None:
    if node.length != leaf.nbytes:
        raise CheckpointError(
            f"{path_name(node.path)}: {node.length} bytes cannot be shape {node.shape}"
        )
    if node.length == 0:
        return
    content = leaf_bytes(leaf)
    file = f"{generation.directory}/{node.file}"
    catalog.storage.read_into(file, node.offset, content)
    if crc32(content) != node.crc32:
        raise Corrupted(
            f"{catalog.storage}/{file}: the CRC32 of tensor {path_name(node.path)} does not hold"
        )


def _targets(into: Any) -> dict[Path, Leaf]:
    items = flatten(into)
    return {path: item for path, item in items if isinstance(item, torch.Tensor | np.ndarray)}


def _check_fit(manifest: Manifest, targets: dict[Path, Leaf]) -> None:
    saved = {node.path: node for node in manifest.state if isinstance(node, Tensor)}
    for path, target in targets.items():
        node = saved.get(path)
        if node is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {path_name(path)} to fill the given one"
            )
        have = (leaf_kind(target), leaf_dtype(target), tuple(target.shape))
        want = (node.kind, node.dtype, node.shape)
        if have != want:
            raise CheckpointError(
                f"cannot load {path_name(path)} into the given one: it is saved as {_described(*want)}, "
                f"the given one is {_described(*have)}"
            )
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise CheckpointError(
                f"cannot load {path_name(path)} into the given array: it is read-only"
            )


def _described(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{kind} {dtype} {list(shape)}"


def _is_plain(leaf: Leaf) -> bool:
    """Whether the leaf's memory is its bytes in order, so that a file can be read into it."""
    if isinstance(leaf, np.ndarray):
        return bool(leaf.flags.c_contiguous)
    return (
        leaf.device.type == "cpu"
        and leaf.is_contiguous()
        and not leaf.is_conj()
        and not leaf.is_neg()
    )


def _copy(source: Leaf, target: Leaf) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, np.asarray(source))
    elif isinstance(source, torch.Tensor):
        with torch.no_grad():
            target.copy_(source)
