"""Reader and writer of this package's format for torch.distributed.checkpoint (DCP).

Use `dcp.save(state, storage_writer=Writer(directory))` and `dcp.load(state,
storage_reader=Reader(directory))`.

DCP names items by their keys joined with dots, and stores the keys separately. The checkpoint holds
the tree of these keys, so a CheckpointManager can load it, too. DCP passes items other than tensors
to a writer as pickles by torch.save. The writer unpickles them as data only (weights_only) and
stores them as typed JSON.
"""

import contextlib
import dataclasses
import functools
import io
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.claims import Claims, identity
from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.formats.dcp_keys import DcpKeys, safely_loaded, tree_of
from fireflyer.checkpoint.load.reader import Reader as BoxReader
from fireflyer.checkpoint.save.background_copies import filled
from fireflyer.checkpoint.save.stream_writer import Section, commit, write_sections
from fireflyer.checkpoint.state.boxes import Box, flaw, intersection, whole
from fireflyer.checkpoint.state.contents import InMemory, itemsize_of, load, pieces_of_bytes
from fireflyer.checkpoint.state.leaves import Local, describe, local_of, writable
from fireflyer.checkpoint.state.tree import Node, Piece, Tensor
from fireflyer.errors import CheckpointError, StorageError
from fireflyer.storage import Storage, open_storage

Place = str | os.PathLike[str] | Storage


def _step_in(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """Returns the number at the end of a checkpoint_id, e.g. 500 of "step-500", or None."""
    match = re.search(r"(\d+)/?$", os.fspath(checkpoint_id))
    return int(match[1]) if match else None


class _Ticket(NamedTuple):
    """Message of the coordinator to a rank."""

    generation: Generation
    rank: int


class _Saved(NamedTuple):
    """Report of a rank to the coordinator on one item: a tensor's pieces or an object's nodes."""

    pieces: tuple[Piece, ...]
    nodes: tuple[Node, ...]


class _Placed:
    """Methods by which DCP sets and queries the location of a reader or writer."""

    def __init__(self, directory: Place, step: int | None) -> None:
        self._catalog = Catalog(
            open_storage(directory) if isinstance(directory, str | os.PathLike) else directory
        )
        self.step = step

    @property
    def checkpoint_id(self) -> str:
        """Directory of the checkpoints; DCP logs it."""
        return str(self._catalog.storage)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        found = _step_in(checkpoint_id) if checkpoint_id is not None else None
        if found is not None:
            self.step = found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _step_in(checkpoint_id) is not None


class Writer(_Placed, StorageWriter):
    """Storage writer for `dcp.save` and `dcp.async_save`. Use one writer for a whole run.

    The first save claims the directory, as a CheckpointManager's first save does. After that,
    writers and managers of an older run cannot commit. A rank writes its items in one stream. The
    checkpoint exists once the coordinator has committed it.
    """

    def __init__(self, directory: Place, step: int | None = None) -> None:
        """
        Args:
            directory: a path, an fsspec URL or a storage; shared by all ranks.
            step: the step of the next save; a number at the end of its checkpoint_id takes
                precedence. If there is neither, the step is that of the newest checkpoint plus 1.

        Raises:
            ConfigError: if FIREFLYER_ATTEMPT is invalid.
            StorageError: if the directory cannot be used.
        """
        super().__init__(directory, step)
        self._claims = Claims(self._catalog.storage, identity())
        self._number = 0
        self._generation: Generation | None = None

    def set_up_storage_writer(
        self, is_coordinator: bool, rank: int = 0, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        """Checks the mode of the save.

        Raises:
            CheckpointError: if the save has no collectives, because then no rank could commit for
                all.
        """
        if not use_collectives:
            raise CheckpointError("a checkpoint of all ranks needs use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Checks that DCP makes a new plan for each save.

        Raises:
            CheckpointError: if the planner caches plans: a cached plan names an earlier save.
        """
        if not plan.usable:
            raise CheckpointError("use a planner without enable_plan_caching")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claims the directory and gives every rank the identity of the save.

        Raises:
            CheckpointError: if a later attempt of this task owns the directory.
        """
        epoch = self._claims.take()
        step = self.step
        if step is None:
            newest = next(iter(self._catalog.generations()), None)
            step = 0 if newest is None else newest.step + 1
        self.step = None
        self._number += 1
        self._generation = Generation(epoch, self._number, step)
        return [
            dataclasses.replace(plan, storage_data=_Ticket(self._generation, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items.

        Raises:
            CheckpointError: if an item cannot be saved; the error names its key.
            StorageError: if the file cannot be written.
        """
        generation, rank = plan.storage_data
        sections: list[Section] = []
        objects: dict[int, InMemory] = {}
        counts: list[int] = []
        for index, item in enumerate(plan.items):
            before = len(sections)
            if item.type == WriteItemType.BYTE_IO:
                objects[index] = _decoded(planner, item)
                sections += _object_sections(item.index.fqn, objects[index])
            else:
                sections += _tensor_sections(planner, item)
            counts.append(len(sections) - before)
        pieces = iter(write_sections(self._catalog.storage, generation.data(rank), sections))
        results = []
        for index, (item, count) in enumerate(zip(plan.items, counts, strict=True)):
            mine = tuple(next(pieces) for _ in range(count))
            nodes = tuple(_with_pieces(objects[index], mine)) if index in objects else ()
            size = sum(piece.length for piece in mine)
            results.append(WriteResult(item.index, size, _Saved(mine, nodes)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint.

        Raises:
            CheckpointError: if the pieces do not cover the tensors, or a newer run owns the
                directory.
            StorageError: if the manifest cannot be written.
        """
        assert self._generation is not None
        saved: dict[str, list[_Saved]] = {}
        for result in (result for of_rank in results for result in of_rank):
            saved.setdefault(result.index.fqn, []).append(result.storage_data)
        try:
            nodes = tree_of(_items(metadata, saved), metadata.planner_data)
            commit(self._catalog, self._claims, self._generation, len(results), nodes)
        except BaseException:
            self._undo(saved)
            raise

    def _undo(self, saved: Mapping[str, list[_Saved]]) -> None:
        """Frees the space of an uncommitted save."""
        assert self._generation is not None
        storage = self._catalog.storage
        with contextlib.suppress(StorageError):
            if storage.size(self._generation.manifest) is None:
                every = (piece for items in saved.values() for one in items for piece in one.pieces)
                for file in {piece.file for piece in every}:
                    storage.delete(file)
                storage.delete(self._generation.directory)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)


def _decoded(planner: SavePlanner, item: WriteItem) -> InMemory:
    """Returns an object that DCP has pickled."""
    key = item.index.fqn
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise CheckpointError(
            f"the planner returned {key} as {type(data).__name__}: expected bytes"
        )
    try:
        return InMemory(safely_loaded(key, data.getvalue()))
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _object_sections(key: str, held: InMemory) -> list[Section]:
    sections = []
    for node in held.tensors:
        for box in held.boxes(node):
            nbytes = box.elements * itemsize_of(node)
            sections.append(Section(key, box, nbytes, functools.partial(held.read, node, box)))
    return sections


def _with_pieces(held: InMemory, pieces: tuple[Piece, ...]) -> list[Node]:
    rest = iter(pieces)
    return [
        Tensor(
            path=node.path,
            kind=node.kind,
            dtype=node.dtype,
            shape=node.shape,
            pieces=tuple(next(rest) for _ in held.boxes(node)),
        )
        if isinstance(node, Tensor)
        else node
        for node in held.nodes
    ]


def _tensor_sections(planner: SavePlanner, item: WriteItem) -> list[Section]:
    """Returns the piece of an item; no piece if the item has no elements."""
    data = item.tensor_data
    assert data is not None
    key, dtype = item.index.fqn, data.properties.dtype
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if not box.elements:
        return []

    def stream() -> Any:
        found = planner.resolve_data(item)
        if not isinstance(found, torch.Tensor):
            raise CheckpointError(f"the planner returned {key} as {type(found).__name__}")
        try:
            describe(found)
        except CheckpointError as error:
            raise CheckpointError(f"cannot save {key}: {error}") from error
        local = local_of(found)
        if tuple(local.shape) != box.shape or local.dtype != dtype:
            raise CheckpointError(
                f"the planner returned {key} as {local.dtype} {list(local.shape)} "
                f"but planned {dtype} {list(box.shape)}"
            )
        return pieces_of_bytes(local)

    return [Section(key, box, box.elements * dtype.itemsize, stream)]


def _items(metadata: Metadata, saved: Mapping[str, list[_Saved]]) -> dict[str, tuple[Node, ...]]:
    """Returns the nodes under each key."""
    items: dict[str, tuple[Node, ...]] = {}
    for key, found in metadata.state_dict_metadata.items():
        parts = saved.get(key, [])
        if isinstance(found, BytesStorageMetadata):
            if not parts:
                raise CheckpointError(f"no rank has written {key}")
            items[key] = parts[0].nodes
            continue
        pieces = tuple(piece for part in parts for piece in part.pieces)
        shape = tuple(found.size)
        if problem := flaw(shape, [Box(piece.offsets, piece.shape) for piece in pieces]):
            raise CheckpointError(f"cannot save {key}: {problem}")
        dtype = str(found.properties.dtype).removeprefix("torch.")
        items[key] = (Tensor(path=(), kind="torch", dtype=dtype, shape=shape, pieces=pieces),)
    return items


class Reader(_Placed, StorageReader):
    """Storage reader for `dcp.load`: loads any checkpoint of this package into any layout.

    All ranks read the newest checkpoint that the coordinator finds, and verify each byte. Damaged
    data is not set aside: it raises an error that names file and tensor. Then `step` can select
    another checkpoint.
    """

    def __init__(self, directory: Place, step: int | None = None) -> None:
        """
        Args:
            directory: a path, an fsspec URL or a storage.
            step: the checkpoint's step; a number at the end of a checkpoint_id takes precedence. If
                there is neither, the newest checkpoint is read.

        Raises:
            StorageError: if the directory cannot be used.
        """
        super().__init__(directory, step)
        self._snapshot: Snapshot | None = None

    def read_metadata(self) -> Metadata:
        """Opens the checkpoint and describes it in DCP's terms.

        Raises:
            CheckpointError: if there is no checkpoint, or its state is not a dict.
            Corrupted: if all checkpoints are damaged.
        """
        self._snapshot = Snapshot.open(self._catalog, self.step)
        keys = DcpKeys(str(self._snapshot), self._snapshot.nodes)
        found: dict[str, Any] = {key: BytesStorageMetadata() for key in keys.objects}
        for key, node in keys.tensors.items():
            size = torch.Size(node.shape)
            # One chunk, regardless of the pieces, because any box can be read.
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(dtype=getattr(torch, node.dtype))
            found[key] = TensorStorageMetadata(properties, size, [chunk])
        return Metadata(found, planner_data=keys.paths, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Does nothing, because `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert self._snapshot is not None
        generation = self._snapshot.generation
        return [dataclasses.replace(plan, storage_data=generation) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items into their targets.

        Raises:
            Corrupted: if the data is damaged; the error names file and tensor.
            CheckpointError: if the coordinator's checkpoint lacks an item of this rank's plan.
        """
        snapshot, storage = self._chosen(plan.storage_data), self._catalog.storage
        keys = DcpKeys(str(snapshot), snapshot.nodes)
        reader = BoxReader(storage)
        done: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        with contextlib.ExitStack() as ends:
            for item in plan.items:
                key = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled(snapshot, keys, key))
                    continue
                node, box = _wanted(keys, item)
                target = planner.resolve_tensor(item).detach()
                dtype = getattr(torch, node.dtype)
                if target.dtype == dtype:
                    place = ends.enter_context(writable(target))
                else:
                    place = torch.empty(box.shape, dtype=dtype)
                reader.want(node, place, box)
                done.append((item, target, target if target.dtype == dtype else place))  # type: ignore[arg-type]
            ends.enter_context(filled([target for _, target, _ in done]))
            reader.run()
        for item, target, place in done:
            if place is not target:
                target.copy_(place)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _chosen(self, generation: Generation) -> Snapshot:
        """Opens the coordinator's checkpoint, because this rank may have opened an older one."""
        if self._snapshot is None or self._snapshot.generation != generation:
            manifest = self._catalog.manifest(generation)
            self._snapshot = Snapshot(self._catalog.storage, generation, manifest)
        return self._snapshot


def _wanted(keys: DcpKeys, item: ReadItem) -> tuple[Tensor, Box]:
    node = keys.tensors.get(item.storage_index.fqn)
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    if node is None or (box.elements and intersection(box, whole(node.shape)) != box):
        raise CheckpointError(f"the checkpoint has no part of {item.storage_index.fqn} with {box}")
    return node, box


def _pickled(snapshot: Snapshot, keys: DcpKeys, key: str) -> io.BytesIO:
    """Returns an object, pickled as DCP expects it."""
    if key not in keys.objects:
        raise CheckpointError(f"{snapshot} has no object {key}")
    loaded: dict[Any, Local] = {
        node.path: load(snapshot, node) for node in keys.tensors_within(key)
    }
    data = io.BytesIO()
    torch.save(keys.assembled(key, loaded), data)
    data.seek(0)
    return data
