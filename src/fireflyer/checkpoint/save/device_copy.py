"""Copies of device tensors into the arena: the device runs them, in a separate stream."""

from typing import Any

import numpy as np
import torch

from fireflyer._native import hfreduce as native
from fireflyer._native.checkpoint import Arena, DeviceCopy, DeviceLane
from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.backend.devices import DeviceContext, context_of
from fireflyer.log import get_logger

_log = get_logger("checkpoint")


class CopyStreams:
    """Copy streams from devices into one arena, one stream per device. Not thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lanes: dict[native.Device, DeviceLane] = {}
        self._unpinned: set[native.Device] = set()
        """Devices that cannot pin the arena."""
        self._unknown: set[torch.device] = set()
        """Devices that hfreduce does not support."""

    def context_of(self, tensor: torch.Tensor) -> DeviceContext | None:
        """Returns the tensor's device context; None for a host tensor, or one that only torch can
        copy."""
        if self._unknown and tensor.device in self._unknown:
            return None
        try:
            return context_of(tensor)
        except CollectiveError as error:
            self._unknown.add(tensor.device)
            _log.warning(
                "torch copies the tensors on %s and save() waits for it: %s", tensor.device, error
            )
            return None

    def start(
        self, context: DeviceContext, copies: np.ndarray[Any, Any], *, compare: bool, follow: bool
    ) -> DeviceCopy:
        """Starts to copy from a device, after the work in the caller's current stream there.

        Args:
            copies: int64 [n, 3], see DeviceLane.start.
            compare: compare the bytes with the arena's contents, see DeviceCopy.changed.
            follow: make the caller's stream wait for the copy, so that later work in the stream may
                change the sources.

        Raises:
            CheckpointError: if the device reports an error.
        """
        try:
            if context.device not in self._lanes:
                self._lanes[context.device] = DeviceLane(context.device)
            self._pin(context.device)
            return self._lanes[context.device].start(
                self._arena, copies, context.stream(), compare=compare, follow=follow
            )
        except CollectiveError as error:
            raise CheckpointError(f"cannot copy tensors from their device: {error}") from error

    def _pin(self, device: native.Device) -> None:
        """Pins the arena's current memory; copies to unpinned memory work, too, but slowly."""
        if device in self._unpinned:
            return
        try:
            self._arena.pin(device)
        except CollectiveError as error:
            self._unpinned.add(device)
            _log.warning("saves are slower because the staging arena is not pinned: %s", error)
