"""Loading: the ranks agree on a generation; each rank reads, verifies and assembles its state."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from fireflyer._native.storage import advise_huge
from fireflyer.checkpoint.control_group import ControlGroup, rank_and_world
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.manifest import Generation, Manifest
from fireflyer.checkpoint.load.aliases import Place, agreed, fill
from fireflyer.checkpoint.load.reader import Reader
from fireflyer.checkpoint.save.background_copies import filled
from fireflyer.checkpoint.state.boxes import Box, whole
from fireflyer.checkpoint.state.leaves import (
    Description,
    Leaf,
    Local,
    address_of,
    describe,
    local_of,
    new_local,
    overlaps_itself,
    writable,
)
from fireflyer.checkpoint.state.tree import (
    Container,
    Node,
    Path,
    Tensor,
    Value,
    flatten,
    path_name,
    unflatten,
)
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.log import get_logger

_log = get_logger("checkpoint")
_HUGE_BYTES = 4 << 20
"""Minimum size of a new tensor for which huge pages are advised."""
_GOOD, _GONE, _UNREADABLE, _DAMAGED, _FAILED = range(5)


class Loaded(NamedTuple):
    """Result of `load_newest`."""

    generation: Generation
    state: Any
    per_rank: Any | None


class _Choice(NamedTuple):
    source: int
    generation: Generation


def load_newest(
    sources: Sequence[Catalog],
    step: int | None,
    into: Any | None,
    rest: bool,
    control: ControlGroup,
) -> Loaded:
    """Loads the newest good checkpoint (of `step`, if given); collective over all ranks.

    Rank 0 picks a checkpoint, and all ranks read and verify it. The worst finding of any rank
    applies to all ranks. If a rank finds the checkpoint damaged, rank 0 sets it aside. An
    unreadable checkpoint stays where it is. In both cases the next older checkpoint is tried.

    Args:
        sources: the catalogs to search. If several catalogs have the same checkpoint, the first of
            them is used.

    Raises:
        CheckpointError: on every rank, if no checkpoint is good or `into` does not fit.
        StorageError: if this rank cannot read the directory, or cannot read a checkpoint and no
            older one is good; the other ranks get a CheckpointError.
    """
    skipped: set[_Choice] = set()
    unread: Exception | None = None
    while True:
        choice = _pick(sources, step, skipped, unread, control)
        catalog, generation = sources[choice.source], choice.generation
        finding, loaded = _GOOD, None
        error: Exception | None = None
        try:
            loaded = _read(catalog, generation, into, rest)
        except Exception as failure:  # noqa: BLE001  # the other ranks must learn of any failure
            finding, error = _judge(catalog, generation, failure), failure
        findings = [row[0] for row in control.numbers([finding])]
        if _FAILED in findings:
            rank = findings.index(_FAILED)
            reasons = control.blobs(str(error).encode() if finding == _FAILED else b"")
            if error is not None and finding == _FAILED:
                raise error
            raise CheckpointError(
                f"rank {rank} could not load step {generation.step}: {reasons[rank].decode()}"
            )
        if loaded is not None and max(findings) == _GOOD:
            return loaded
        skipped.add(choice)
        if finding == _UNREADABLE:
            unread = unread or error
        if max(findings) > _GONE:
            _skip(catalog, generation, findings, error)


def _judge(catalog: Catalog, generation: Generation, failure: Exception) -> int:
    """Classifies a failure to read a checkpoint. A run that saves may have removed the checkpoint
    meanwhile."""
    if not isinstance(failure, CheckpointError | StorageError):
        return _FAILED
    # An unreachable storage, or a lack of memory, is no evidence about one checkpoint.
    unreadable = isinstance(failure, StorageError) and not failure.retryable
    try:
        if catalog.storage.size(generation.manifest) is None:
            return _GONE
    except StorageError:
        return _UNREADABLE if unreadable else _FAILED
    if isinstance(failure, Corrupted):
        return _DAMAGED
    return _UNREADABLE if unreadable else _FAILED


def _pick(
    sources: Sequence[Catalog],
    step: int | None,
    skipped: set[_Choice],
    unread: Exception | None,
    control: ControlGroup,
) -> _Choice:
    """Returns rank 0's choice on every rank.

    Args:
        unread: this rank's error for the newest skipped checkpoint that was unreadable.
    """
    rank, _ = rank_and_world()
    mine = [0, 0, 0, 0]
    failure: StorageError | None = None
    if rank == 0:
        try:
            newest = _newest(sources, step, skipped)
            if newest is not None:
                found = newest.generation
                mine = [newest.source, found.epoch, found.number, found.step]
        except StorageError as error:
            failure, mine = error, [-1, 0, 0, 0]
    source, epoch, number, of_step = control.numbers(mine)[0]
    if failure is not None:
        raise failure
    if source < 0:
        raise CheckpointError("rank 0 cannot list the checkpoints; see its error")
    if epoch == 0 and unread is not None:
        raise unread
    if epoch == 0:
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        storage = sources[-1].storage
        damaged = (
            f"; {len(skipped)} damaged: see the warnings and {storage}/damaged" if skipped else ""
        )
        raise CheckpointError(f"there is no good {what} in {storage}{damaged}")
    return _Choice(source, Generation(epoch, number, of_step))


def _newest(sources: Sequence[Catalog], step: int | None, skipped: set[_Choice]) -> _Choice | None:
    found = (
        _Choice(index, generation)
        for index, source in enumerate(sources)
        for generation in source.generations(step)
    )
    left = (choice for choice in found if choice not in skipped)
    return max(left, key=lambda choice: (choice.generation, -choice.source), default=None)


def _skip(
    catalog: Catalog, generation: Generation, findings: Sequence[int], reason: Exception | None
) -> None:
    """Sets a damaged checkpoint aside. The rank with the worst finding logs why the checkpoint is
    skipped."""
    rank, _ = rank_and_world()
    worst = max(findings)
    if rank == findings.index(worst):
        _warn(generation, worst, reason, f"{catalog.fate}, " if worst == _DAMAGED else "")
    if rank == 0 and worst == _DAMAGED:
        catalog.set_aside(generation)


def _warn(generation: Generation, finding: int, reason: Exception | None, fate: str) -> None:
    _log.warning(
        "the checkpoint of step %d %s: %s; %strying the next older one",
        generation.step,
        "is damaged" if finding == _DAMAGED else "cannot be read",
        reason,
        fate,
    )


class _Target(NamedTuple):
    leaf: Leaf
    local: Local
    description: Description


def _read(catalog: Catalog, generation: Generation, into: Any | None, rest: bool) -> Loaded:
    manifest = catalog.manifest(generation)
    paths, targets = _wanted(into)
    _check_fit(manifest, targets)
    nodes: Sequence[Node] = manifest.state
    if into is not None and not rest:
        if lacking := paths - {node.path for node in nodes}:
            name = path_name(min(lacking, key=path_name))
            raise CheckpointError(f"the checkpoint has no {name}, which the given state has")
        nodes = [node for node in nodes if node.path in paths]
    rank, _ = rank_and_world()
    own = manifest.per_rank.get(str(rank), ())
    reader = Reader(catalog.storage)
    settled = _settled(catalog, nodes, targets)
    with ExitStack() as finish:
        if targets:
            finish.enter_context(filled(_tensors_of(targets)))
        leaves = {path: targets[path].leaf for path in settled}
        leaves |= _want(
            reader, (node for node in nodes if node.path not in settled), targets, finish
        )
        own_leaves = _want(reader, own, {}, finish)
        reader.run()
        for path, value in settled.items():
            if value is not None:
                fill(targets[path].local, value)
    state = unflatten(nodes, leaves)
    return Loaded(generation, state, unflatten(own, own_leaves) if own else None)


def _settled(
    catalog: Catalog, nodes: Sequence[Node], targets: Mapping[Path, _Target]
) -> dict[Path, Local | None]:
    """Returns the values for targets that share memory; see `agreed`."""
    places = []
    for node in nodes:
        target = targets.get(node.path)
        if isinstance(node, Tensor) and target is not None and target.description.box is not None:
            places.append(Place(node, target.local, target.description.box))
    return agreed(catalog.storage, places)


def _want(
    reader: Reader, nodes: Iterable[Node], targets: dict[Path, _Target], finish: ExitStack
) -> dict[Path, Leaf]:
    """Requests the nodes' tensors from the reader; returns the leaves that it will fill."""
    leaves: dict[Path, Leaf] = {}
    for node in nodes:
        if not isinstance(node, Tensor):
            continue
        target = targets.get(node.path)
        if target is None:
            local = _new(node)
            box: Box | None = whole(node.shape)
            leaves[node.path] = local
        else:
            local = finish.enter_context(writable(target.local))
            box = target.description.box
            leaves[node.path] = target.leaf
        if box is not None:
            reader.want(node, local, box)
    return leaves


def _tensors_of(targets: Mapping[Path, _Target]) -> list[torch.Tensor]:
    """Returns all tensors of the targets. A DTensor and its local part are both listed, because each
    has a version counter."""
    return [
        one
        for target in targets.values()
        for one in {id(one): one for one in (target.leaf, target.local)}.values()
        if isinstance(one, torch.Tensor)
    ]


def _new(node: Tensor) -> Local:
    try:
        local = new_local(node.kind, node.dtype, node.shape)
        address = address_of(local)
        if address is not None and local.nbytes >= _HUGE_BYTES:
            advise_huge(address, local.nbytes)
        return local
    except CheckpointError as error:
        raise CheckpointError(f"cannot load {path_name(node.path)}: {error}") from error


def _wanted(into: Any | None) -> tuple[set[Path], dict[Path, _Target]]:
    """Returns all paths of `into`, and its tensors by path."""
    paths: set[Path] = set()
    targets: dict[Path, _Target] = {}
    for path, item in flatten(into) if into is not None else ():
        paths.add(path)
        if isinstance(item, Container | Value):
            continue
        try:
            targets[path] = _Target(item, local_of(item), describe(item))
        except CheckpointError as error:
            raise CheckpointError(f"cannot load into {path_name(path)}: {error}") from error
    return paths, targets


def _check_fit(manifest: Manifest, targets: dict[Path, _Target]) -> None:
    saved = {node.path: node for node in manifest.state if isinstance(node, Tensor)}
    for path, target in targets.items():
        node = saved.get(path)
        if node is None:
            raise CheckpointError(
                f"the given state has a tensor {path_name(path)}, but the checkpoint has none"
            )
        have = target.description.kind, target.description.dtype, target.description.shape
        want = (node.kind, node.dtype, node.shape)
        if have != want:
            raise CheckpointError(
                f"cannot load {path_name(path)} into the given one: it is saved as {_described(*want)}, "
                f"but the given one is {_described(*have)}"
            )
        if isinstance(target.local, np.ndarray) and not target.local.flags.writeable:
            raise CheckpointError(
                f"cannot load {path_name(path)} into the given array: it is read-only"
            )
        if overlaps_itself(target.local):
            raise CheckpointError(
                f"cannot load {path_name(path)} into the given one: its elements share memory "
                "(expanded?); give a copy of it"
            )


def _described(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{kind} {dtype} {list(shape)}"


def read_tensors(
    sources: Sequence[Catalog], patterns: Sequence[str], step: int | None
) -> dict[str, Local]:
    """Returns the newest good checkpoint's tensors whose names match a pattern; not collective."""
    skipped: set[_Choice] = set()
    unread: StorageError | None = None
    while (choice := _newest(sources, step, skipped)) is not None:
        catalog, generation = sources[choice.source], choice.generation
        try:
            return _read_matching(catalog, generation, patterns)
        except StorageError as error:
            finding = _judge(catalog, generation, error)
            if finding == _FAILED:
                raise
            if finding == _UNREADABLE:
                unread = unread or error
            if finding != _GONE:
                _warn(generation, finding, error, "")
        skipped.add(choice)
    if unread is not None:
        raise unread
    what = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointError(f"there is no good {what} in {sources[-1].storage}")


def _read_matching(
    catalog: Catalog, generation: Generation, patterns: Sequence[str]
) -> dict[str, Local]:
    manifest = catalog.manifest(generation)
    reader = Reader(catalog.storage)
    found: dict[str, Local] = {}
    for node in manifest.state:
        if isinstance(node, Tensor):
            name = path_name(node.path)
            if any(name == one or fnmatch.fnmatchcase(name, one) for one in patterns):
                if name in found:
                    raise CheckpointError(
                        f"two tensors of step {generation.step} have the name {name}"
                    )
                found[name] = _new(node)
                reader.want(node, found[name], whole(node.shape))
    if not found:
        raise CheckpointError(f"no tensor of step {generation.step} matches {', '.join(patterns)}")
    reader.run()
    return found
