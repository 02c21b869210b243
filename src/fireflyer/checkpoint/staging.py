"""Staging: one rank's pieces copied into the arena, while the caller waits or under its next step."""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fireflyer._native.checkpoint import Arena, Copy, DeviceCopy
from fireflyer.checkpoint.boxes import Box
from fireflyer.checkpoint.devices import Lanes
from fireflyer.checkpoint.leaves import Leaf, Local, address_of, copy_box, lies_in_order
from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.devices import Seat

ALIGNMENT = 64
"""Pieces start at multiples of this in the arena and in files."""

OVERLAP_BYTES = 64 << 10
"""With overlap, smaller pieces are copied at once: buffers that a forward pass changes are small."""

QUIET_S = 1.0
"""No operation on one tensor takes longer: a change under the copy shows in its version counter by then."""


class Section(NamedTuple):
    """A piece on its way: where it comes from and its place in the arena."""

    leaf: int
    box: Box
    """In the leaf's local part."""
    start: int
    """Its first byte there, in C order; it is contiguous."""
    nbytes: int
    offset: int
    """In the arena."""


class Table:
    """One rank's sections, back to back but for the alignment."""

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
        """Bytes of the arena that it needs."""
        self.leaf = np.array([section.leaf for section in self.sections], np.int64)
        """int64 [sections]."""
        self._copies = np.array(
            [(section.start, section.offset, section.nbytes) for section in self.sections], np.int64
        ).reshape(-1, 3)

    def copies(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """int64 [n, 3]: source address, arena offset, bytes of each section; the source is below 0 for a leaf
        whose address, in `addresses` [leaves], is."""
        found = self._copies.copy()
        base = addresses[self.leaf]
        found[:, 0] = np.where(base < 0, -1, found[:, 0] + base)
        return found


class Source(NamedTuple):
    """What must stay as it is while it is copied."""

    name: str
    tensor: torch.Tensor
    version: int
    local: torch.Tensor
    """Where its bytes are: the tensor itself, or the DTensor's part."""
    place: tuple[int, int]
    storage: torch.UntypedStorage
    """Held: `tensor.data = ...` and `tensor.set_(...)` would free it under the copy."""

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version or _place(self.local) != self.place


def _place(local: torch.Tensor) -> tuple[int, int]:
    return local.data_ptr(), local.untyped_storage().nbytes()


class Staged:
    """A copy on its way, and the check that its sources stood still meanwhile. For any thread."""

    def __init__(self, data: memoryview, count: int, filling: int) -> None:
        self.data = data
        """The arena's bytes; valid until the next copy."""
        self.filling = filling
        self.changed: np.ndarray[Any, Any] = np.ones(count, np.bool_)
        """bool [sections], after `wait`: which differ from what the arena held; all if not asked for."""
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
        """A copy from `keep` that has been started; of these sections, if it compares."""
        self._copies.append((copy, compared))
        self._keep = keep

    def watch(self, watched: list[Source]) -> None:
        """What must not change before `release`."""
        self._watched = watched

    def wait(self, upto: int | None = None, help: bool = False) -> None:
        """Returns when the arena's first `upto` bytes (all, if None) are in place; copies, too, if `help`.

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
        """Returns when no copy needs cores any more; what devices copy may go on."""
        for copy, _ in self._copies:
            if isinstance(copy, Copy):
                copy.wait(None, False)

    def release(self) -> None:
        """For the thread that trains, before it changes the state: ends the copy and looks at its sources."""
        if not self._still.is_set():
            with contextlib.suppress(CheckpointError):  # who commits waits, too, and tells it
                self.wait(help=True)
            self._look()

    def check(self) -> None:
        """For the thread that commits.

        Raises:
            CheckpointError: naming a tensor that changed before it was copied.
        """
        self.wait()
        # An operation may have begun under the copy whose version counter moves only at its end.
        if not self._still.wait(QUIET_S if self._watched else 0):
            self._look()
        if self._moved is not None:
            raise CheckpointError(
                f"{self._moved} changed while it was copied: with overlap=True, call before_step() "
                "before anything that changes the state"
            )

    def forget(self) -> None:
        """The save is over: the arena's bytes may go, and what is not copied need not be."""
        self.data = memoryview(b"")
        self._copies = []

    def _look(self) -> None:
        with self._lock:
            if not self._still.is_set():
                self._moved = next((one.name for one in self._watched if one.changed), None)
                self._watched, self._keep = [], ()
                self._still.set()


def _await_device(copy: DeviceCopy, upto: int | None) -> None:
    try:
        copy.wait(upto)
    except CollectiveError as error:
        raise CheckpointError(f"tensors were not copied from their device: {error}") from error


class _Places(NamedTuple):
    """Where the local parts of all leaves lie, by leaf."""

    addresses: np.ndarray[Any, Any]
    """int64; -1: only torch or numpy can copy it."""
    seats: np.ndarray[Any, Any]
    """int64, in `found`; -1: on the host."""
    found: list[Seat]


class Stager:
    """Fills the arena that is kept from save to save. Not safe for threads."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._lanes = Lanes(self._arena)
        self.filling = 0
        """Another number whenever the arena's bytes may be others."""

    def reserve(self, size: int) -> None:
        """Makes the arena large enough.

        Raises:
            NoSpace: if there is no memory.
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
        """Starts to copy the sections of a table that the arena has room for.

        Args:
            leaves, locals_, names: of the state, by leaf.
            overlap: the copy of large tensors may take its time; the rest is in place at the return, or on a
                device copied before what comes later in the caller's current stream there.
            compare: find which sections differ from what the arena holds.

        Raises:
            CheckpointError: if a device refuses.
        """
        data = self._arena.memory(table.size) if table.size else memoryview(b"")
        self.filling += 1
        staged = Staged(data, len(table.sections), self.filling)
        places = self._places(locals_)
        copies = table.copies(places.addresses)
        odd = copies[:, 0] < 0
        late = np.zeros(len(copies), np.bool_)
        if overlap:
            watchable = np.array([_is_watchable(local) for local in locals_], np.bool_)
            late = ~odd & (copies[:, 2] >= OVERLAP_BYTES) & watchable[table.leaf]
            staged.watch(_watched(table.leaf[late], leaves, locals_, names))
        seats = places.seats[table.leaf]
        # Devices first: they copy while the host does. The host is waited for first: it can be helped.
        from_devices = [
            self._start_device(seat, copies, seats == number, late, overlap, compare)
            for number, seat in enumerate(places.found)
        ]
        for index in np.flatnonzero(odd):
            section = table.sections[index]
            staged.changed[index] = _copy_odd(data, section, locals_[section.leaf], compare)
        host = ~odd & (seats < 0)
        for chosen in (host & ~late, host & late):
            if chosen.any():
                behind = bool(late[chosen][0])
                copy = self._arena.start(copies[chosen], compare=compare, background=behind)
                staged.add(copy, np.flatnonzero(chosen) if compare else None, locals_)
                if overlap and not behind:
                    copy.wait()
        for device_copy, compared in itertools.chain(*from_devices):
            staged.add(device_copy, compared, locals_)
        return staged

    def _start_device(
        self,
        seat: Seat,
        copies: np.ndarray[Any, Any],
        there: np.ndarray[Any, Any],
        late: np.ndarray[Any, Any],
        overlap: bool,
        compare: bool,
    ) -> list[tuple[DeviceCopy, np.ndarray[Any, Any] | None]]:
        """Starts the copies of the sections that lie `there`; those that are not late come first."""
        started = []
        for chosen in (there & ~late, there & late):
            if not chosen.any():
                continue
            at_once = overlap and not late[chosen][0]
            copy = self._lanes.start(
                seat, copies[chosen], compare=compare, follow=at_once and not compare
            )
            if at_once and compare:
                _await_device(copy, None)
            started.append((copy, np.flatnonzero(chosen) if compare else None))
        return started

    def _places(self, locals_: Sequence[Local]) -> _Places:
        addresses = np.full(len(locals_), -1, np.int64)
        seats = np.full(len(locals_), -1, np.int64)
        found: list[Seat] = []
        for index, local in enumerate(locals_):
            if not isinstance(local, torch.Tensor) or (seat := self._lanes.seat_of(local)) is None:
                address = address_of(local)
                if address is not None:
                    addresses[index] = address
            elif lies_in_order(local):
                addresses[index] = local.data_ptr()
                if seat not in found:
                    found.append(seat)
                seats[index] = found.index(seat)
        return _Places(addresses, seats, found)


def _is_watchable(local: Local) -> bool:
    return isinstance(local, torch.Tensor) and not local.is_inference()


def _watched(
    chosen: np.ndarray[Any, Any],
    leaves: Sequence[Leaf],
    locals_: Sequence[Local],
    names: Sequence[str],
) -> list[Source]:
    """The chosen leaves. A DTensor's version counts apart from its local part's."""
    found = []
    for index in np.unique(chosen):
        local = locals_[index]
        assert isinstance(local, torch.Tensor)  # it is watchable
        for one in {id(one): one for one in (leaves[index], local)}.values():
            if isinstance(one, torch.Tensor):
                storage = local.untyped_storage()
                place = _place(local)
                found.append(Source(names[index], one, one._version, local, place, storage))
    return found


def _copy_odd(data: memoryview, section: Section, local: Local, compare: bool) -> bool:
    """Copies what has no address: strided, lazily conjugated, on an unknown device. Whether it changed."""
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
