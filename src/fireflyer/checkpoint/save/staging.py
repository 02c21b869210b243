"""Staging: copies one rank's pieces into the arena, in `save` or during the next step.

The arena is host memory that is reused from save to save.
"""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fireflyer._native.checkpoint import Arena, Copy, DeviceCopy
from fireflyer.checkpoint.save import background_copies
from fireflyer.checkpoint.save.device_copy import CopyStreams
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.leaves import Leaf, Local, address_of, copy_box, lies_in_order
from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.backend.devices import DeviceContext

ALIGNMENT = 64
"""Alignment in bytes: pieces start at multiples of it in the arena and in files."""

OVERLAP_BYTES = 64 << 10
"""Minimum size of the pieces whose copy may overlap training. Smaller pieces are copied before
`save` returns, because they include the buffers that a forward pass changes."""

QUIET_S = 1.0
"""Upper bound of the duration of one operation on a tensor, in seconds. A change during the copy
shows in the tensor's version counter within this time."""


class Section(NamedTuple):
    """Piece in flight: its source and its place in the arena."""

    leaf: int
    box: Box
    """Box in the coordinates of the leaf's local part."""
    start: int
    """Byte offset of the piece in the local part in C order; the piece is contiguous there."""
    nbytes: int
    offset: int
    """Byte offset in the arena."""


class Table:
    """One rank's sections, back to back except for alignment."""

    def __init__(self, pieces: Sequence[tuple[int, Box, int, int]]) -> None:
        """
        Args:
            pieces: leaf, box, start and nbytes of each section.
        """
        self.sections: list[Section] = []
        end = 0
        for leaf, box, start, nbytes in pieces:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            self.sections.append(Section(leaf, box, start, nbytes, offset))
            end = offset + nbytes
        self.size = end
        """Number of bytes of the arena that the sections need."""
        self.leaf = np.array([section.leaf for section in self.sections], np.int64)
        """Leaf of each section, int64 [sections]."""
        self._copies = np.array(
            [(section.start, section.offset, section.nbytes) for section in self.sections], np.int64
        ).reshape(-1, 3)

    def copies(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns int64 [n, 3]: source address, arena offset and number of bytes of each section.

        A source address is negative if the leaf's address in `addresses` [leaves] is negative.
        """
        found = self._copies.copy()
        base = addresses[self.leaf]
        found[:, 0] = np.where(base < 0, -1, found[:, 0] + base)
        return found


class Source(NamedTuple):
    """Tensor that must not change while it is copied."""

    name: str
    tensor: torch.Tensor
    version: int
    local: torch.Tensor
    """Tensor that holds the bytes: the tensor itself, or the DTensor's local part."""
    place: tuple[int, int]
    storage: torch.UntypedStorage
    """Reference that keeps the memory alive: otherwise `tensor.data = ...` and `tensor.set_(...)`
    would free it during the copy."""

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version or _place(self.local) != self.place


def _place(local: torch.Tensor) -> tuple[int, int]:
    return local.data_ptr(), local.untyped_storage().nbytes()


class Staged:
    """Copy in flight, and the check that its sources did not change. For use from any thread."""

    def __init__(self, data: memoryview, count: int, filling: int) -> None:
        self.data = data
        """Bytes of the arena; valid until the next copy."""
        self.filling = filling
        self.changed: np.ndarray[Any, Any] = np.ones(count, np.bool_)
        """bool [sections], valid after `wait`: marks sections that differ from the arena's previous
        contents. All are True if no comparison was requested."""
        self._copies: list[tuple[Copy | DeviceCopy, np.ndarray[Any, Any] | None]] = []
        self._watched: list[Source] = []
        self._keep: Sequence[Local] = ()
        self._lock = threading.Lock()
        self._still = threading.Event()
        self._moved: str | None = None

    def add(
        self,
        copy: Copy | DeviceCopy,
        compared: np.ndarray[Any, Any] | None,
        keep: Sequence[Local],
    ) -> None:
        """Adds a copy that has been started.

        Args:
            compared: indices of the copied sections, if the copy compares them with the arena's
                contents; else None.
            keep: sources of the copy, to keep alive until it ends.
        """
        self._copies.append((copy, compared))
        self._keep = keep

    def watch(self, watched: list[Source]) -> None:
        """Sets the sources that must not change before `release`; call it after the last `add`.

        From now on torch's optimizers call `release` before their step.
        """
        self._watched = watched
        background_copies.begun(self)

    def wait(self, upto: int | None = None, help: bool = False) -> None:
        """Waits until the arena's first `upto` bytes (None: all) are in place.

        Args:
            help: the calling thread takes part in the copy.

        Raises:
            CheckpointError: if a device has failed.
        """
        for copy, compared in self._copies:
            if isinstance(copy, Copy):
                copy.wait(upto, help)
            else:
                _await_device(copy, upto)
            if upto is None and compared is not None:
                self.changed[compared] = copy.changed()

    def wait_for_cores(self) -> None:
        """Waits until no copy needs CPU cores; copies by devices may still be in flight."""
        for copy, _ in self._copies:
            if isinstance(copy, Copy):
                copy.wait(None, False)

    def release(self) -> None:
        """Completes the copy and checks its sources. The training thread calls this before it
        changes the sources."""
        if not self._still.is_set():
            with contextlib.suppress(CheckpointError):  # the committing thread raises it
                self.wait(help=True)
            self._look()

    def check(self) -> None:
        """Waits for the copy and checks its sources; called by the committing thread.

        Raises:
            CheckpointError: if a tensor changed before it was copied; the error names the tensor.
        """
        self.wait()
        # An operation that began during the copy may advance the version counter only at its end.
        if not self._still.wait(QUIET_S if self._watched else 0):
            self._look()
        if self._moved is not None:
            raise CheckpointError(
                f"{self._moved} changed while it was copied: with overlap=True, call before_step() "
                "before anything that changes the state"
            )

    def forget(self) -> None:
        """Releases the arena's bytes and the copies after the end of the save."""
        background_copies.ended(self)
        self.data = memoryview(b"")
        self._copies = []

    def _look(self) -> None:
        with self._lock:
            if not self._still.is_set():
                self._moved = next((one.name for one in self._watched if one.changed), None)
                self._watched, self._keep = [], ()
                self._still.set()
                background_copies.ended(self)


def _await_device(copy: DeviceCopy, upto: int | None) -> None:
    try:
        copy.wait(upto)
    except CollectiveError as error:
        raise CheckpointError(f"cannot copy tensors from their device: {error}") from error


class _Places(NamedTuple):
    """Addresses of the local parts of all leaves, by leaf."""

    addresses: np.ndarray[Any, Any]
    """int64 addresses; -1 if only torch or numpy can copy the leaf."""
    contexts: np.ndarray[Any, Any]
    """int64 indices into `found`; -1 if the leaf is on the host."""
    found: list[DeviceContext]


class Stager:
    """Fills the arena, which is reused from save to save. Not thread-safe."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._lanes = CopyStreams(self._arena)
        self.filling = 0
        """Counter that increases whenever the arena's bytes may have changed."""

    def reserve(self, size: int) -> None:
        """Grows the arena to at least `size` bytes.

        Raises:
            NoSpace: if there is not enough memory.
        """
        if size > self._arena.capacity:
            self.filling += 1
            self._arena.reserve(size)

    def stage(
        self,
        table: Table,
        leaves: Sequence[Leaf],
        locals_: Sequence[Local],
        names: Sequence[str],
        *,
        overlap: bool,
        compare: bool,
    ) -> Staged:
        """Starts to copy a table's sections into the arena, which must be large enough.

        Args:
            leaves, locals_, names: the state's leaves, by leaf index.
            overlap: large tensors may be copied after the return. Other tensors are in place at the
                return; on a device, their copy precedes later work in the caller's current stream.
            compare: find the sections that differ from the arena's contents.

        Raises:
            CheckpointError: if a device reports an error.
        """
        data = self._arena.memory(table.size) if table.size else memoryview(b"")
        self.filling += 1
        staged = Staged(data, len(table.sections), self.filling)
        places = self._places(locals_)
        copies = table.copies(places.addresses)
        odd = copies[:, 0] < 0
        late = np.zeros(len(copies), np.bool_)
        watched: list[Source] = []
        if overlap:
            watchable = np.array([_is_watchable(local) for local in locals_], np.bool_)
            late = ~odd & (copies[:, 2] >= OVERLAP_BYTES) & watchable[table.leaf]
            watched = _watched(table.leaf[late], leaves, locals_, names)
        contexts = places.contexts[table.leaf]
        # Device copies start first, because they run in parallel with the host copy. `wait` begins
        # with the host copy, because the waiting thread can help it.
        from_devices = [
            self._start_device(context, copies, contexts == number, late, overlap, compare)
            for number, context in enumerate(places.found)
        ]
        for index in np.flatnonzero(odd):
            section = table.sections[index]
            staged.changed[index] = _copy_odd(data, section, locals_[section.leaf], compare)
        host = ~odd & (contexts < 0)
        for chosen in (host & ~late, host & late):
            if chosen.any():
                behind = bool(late[chosen][0])
                copy = self._arena.start(copies[chosen], compare=compare, background=behind)
                staged.add(copy, np.flatnonzero(chosen) if compare else None, locals_)
                if overlap and not behind:
                    copy.wait()
        for device_copy, compared in itertools.chain(*from_devices):
            staged.add(device_copy, compared, locals_)
        if watched:
            staged.watch(watched)
        return staged

    def _start_device(
        self,
        context: DeviceContext,
        copies: np.ndarray[Any, Any],
        there: np.ndarray[Any, Any],
        late: np.ndarray[Any, Any],
        overlap: bool,
        compare: bool,
    ) -> list[tuple[DeviceCopy, np.ndarray[Any, Any] | None]]:
        """Starts the copies of the sections that `there` selects.

        Sections that `late` selects, too, come last. Their copies may end after `stage` returns.
        """
        started = []
        for chosen in (there & ~late, there & late):
            if not chosen.any():
                continue
            at_once = overlap and not late[chosen][0]
            copy = self._lanes.start(
                context, copies[chosen], compare=compare, follow=at_once and not compare
            )
            if at_once and compare:
                _await_device(copy, None)
            started.append((copy, np.flatnonzero(chosen) if compare else None))
        return started

    def _places(self, locals_: Sequence[Local]) -> _Places:
        addresses = np.full(len(locals_), -1, np.int64)
        contexts = np.full(len(locals_), -1, np.int64)
        found: list[DeviceContext] = []
        for index, local in enumerate(locals_):
            if (
                not isinstance(local, torch.Tensor)
                or (context := self._lanes.context_of(local)) is None
            ):
                address = address_of(local)
                if address is not None:
                    addresses[index] = address
            elif lies_in_order(local):
                addresses[index] = local.data_ptr()
                if context not in found:
                    found.append(context)
                contexts[index] = found.index(context)
        return _Places(addresses, contexts, found)


def _is_watchable(local: Local) -> bool:
    return isinstance(local, torch.Tensor) and not local.is_inference()


def _watched(
    chosen: np.ndarray[Any, Any],
    leaves: Sequence[Leaf],
    locals_: Sequence[Local],
    names: Sequence[str],
) -> list[Source]:
    """Returns the sources of the chosen leaves.

    A DTensor and its local part have separate version counters, so both are watched.
    """
    found = []
    for index in np.unique(chosen):
        local = locals_[index]
        assert isinstance(local, torch.Tensor)  # implied by _is_watchable
        for one in {id(one): one for one in (leaves[index], local)}.values():
            if isinstance(one, torch.Tensor):
                storage = local.untyped_storage()
                place = _place(local)
                found.append(Source(names[index], one, one._version, local, place, storage))
    return found


def _copy_odd(data: memoryview, section: Section, local: Local, compare: bool) -> bool:
    """Copies a section that only torch or numpy can copy, e.g. from a strided tensor.

    If `compare`, returns True if the copy changed the arena's bytes. Otherwise returns True for
    every section with bytes.
    """
    if section.nbytes == 0:
        return False
    out = np.frombuffer(data, np.uint8, section.nbytes, section.offset)
    if not compare:
        copy_box(local, section.box, out)
        return True
    new = np.empty(section.nbytes, np.uint8)
    copy_box(local, section.box, new)
    if np.array_equal(new, out):
        return False
    out[:] = new
    return True
