"""Tensors on devices: copied into the arena by the device, in a stream of its own."""

from typing import Any

import numpy as np
import torch

from fireflyer._native import hfreduce as native
from fireflyer._native.checkpoint import Arena, DeviceCopy, DeviceLane
from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.devices import Seat, seat_of
from fireflyer.log import get_logger

_log = get_logger("checkpoint")


class Lanes:
    """The ways from devices into one arena, a stream each. Not safe for threads."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lanes: dict[native.Device, DeviceLane] = {}
        self._unpinned: set[native.Device] = set()
        """Devices that refuse to pin."""
        self._unknown: set[torch.device] = set()
        """To hfreduce."""

    def seat_of(self, tensor: torch.Tensor) -> Seat | None:
        """None for what lies in host memory, or where only torch has a way to."""
        if self._unknown and tensor.device in self._unknown:
            return None
        try:
            return seat_of(tensor)
        except CollectiveError as error:
            self._unknown.add(tensor.device)
            _log.warning(
                "tensors on %s are copied by torch, while save() waits: %s", tensor.device, error
            )
            return None

    def start(
        self, seat: Seat, copies: np.ndarray[Any, Any], *, compare: bool, follow: bool
    ) -> DeviceCopy:
        """Starts to copy what lies at a seat, behind what is in the caller's current stream there.

        Args:
            copies: int64 [n, 3], see DeviceLane.start.
            follow: that stream waits for the copy, so that what comes later in it may change the sources.

        Raises:
            CheckpointError: if the device refuses.
        """
        try:
            if seat.device not in self._lanes:
                self._lanes[seat.device] = DeviceLane(seat.device)
            self._pin(seat.device)
            return self._lanes[seat.device].start(
                self._arena, copies, seat.stream(), compare=compare, follow=follow
            )
        except CollectiveError as error:
            raise CheckpointError(f"tensors cannot be copied from their device: {error}") from error

    def _pin(self, device: native.Device) -> None:
        """Once for each memory that the arena gets; a device copies to other memory, too, if slowly."""
        if device in self._unpinned:
            return
        try:
            self._arena.pin(device)
        except CollectiveError as error:
            self._unpinned.add(device)
            _log.warning("the staging arena is not pinned, which makes saves slower: %s", error)
