"""Optimizer state of sharded parameters, moved to another layout.

The state is described in JSON types, so that ranks without state can allocate memory. Tensors that
are sharded like parameters move with the parameters. Other tensors and numbers are equal on all
ranks, and one rank sends them.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from fireflyer.errors import ConfigError
from fireflyer.haiscale.sharding.redistribute import Mover, Piece, rows_of

SHARDED, ALIKE, PLAIN, NUMBER = "sharded", "alike", "plain", "number"
"""Kinds of items of state: a DTensor that is sharded by rows, a replicated DTensor, an ordinary
tensor, any other value."""


class Moments:
    """State of one optimizer to move to another layout.

    Args:
        names: names of the sharded parameters, by id. State of other parameters does not change.

    Raises:
        ConfigError: if the state is sharded differently from the parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer, self._names = optimizer, names
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        self._parameters: dict[str, nn.Parameter] = {names[id(p)]: p for p in own}
        self._old = {name: dict(optimizer.state.get(p, {})) for name, p in self._parameters.items()}
        self._words = {
            name: {key: _described(value, f"{name}: {key}") for key, value in state.items()}
            for name, state in self._old.items()
        }
        self._new: dict[str, dict[str, Any]] = {}

    def groups(self) -> str:
        """Returns a description that must be the same on all ranks."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        return json.dumps([[self._names.get(id(p), "") for p in group] for group in groups])

    def structure(self) -> str:
        """Returns a description that must be the same on all ranks that have state."""
        shapes = {
            name: {key: words[:3] for key, words in state.items()}
            for name, state in self._words.items()
        }
        return json.dumps(shapes, sort_keys=True)

    def learn(self, mover: Mover, values: bool) -> None:
        """Sends the state's description and param_groups' settings to lagging ranks. Collective.

        Without `values` no state is sent.
        """
        if not values:
            self._words.clear()
        lead = mover.from_lead(lambda: [self._words, self._settings()])
        if lead is None or not mover.behind:
            return
        self._words, settings = lead
        for group, said in zip(self._optimizer.param_groups, settings, strict=True):
            group.update({key: _decoded(value) for key, value in said.items()})

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        encoded = [{k: _encoded(v) for k, v in g.items() if k != "params"} for g in groups]
        return [{k: v for k, v in group.items() if v is not None} for group in encoded]

    def pieces(self, names: Iterable[str], mover: Mover) -> list[Piece]:
        """Returns the rows of these parameters' state, to be moved."""
        pieces = []
        for name in names:
            for key, (kind, dtype, shape, _) in self._words.get(name, {}).items():
                if kind != SHARDED:
                    continue
                first, end = rows_of(shape[0], mover.shards, mover.shard)
                new = torch.empty((end - first, *shape[1:]), dtype=getattr(torch, dtype))
                self._new.setdefault(name, {})[key] = new
                old = self._old.get(name, {}).get(key)
                pieces.append(Piece(shape[0], None if old is None else old.to_local(), new))
        return pieces

    def others(self, mover: Mover) -> list[torch.Tensor]:
        """Returns the tensors that all ranks share: existing ones, or new memory on a lagging
        rank."""
        found = []
        for name, state in self._words.items():
            for key, (kind, dtype, shape, value) in state.items():
                if kind == NUMBER:
                    self._new.setdefault(name, {})[key] = _decoded(value)
                elif kind in (ALIKE, PLAIN):
                    old = self._old.get(name, {}).get(key)
                    if isinstance(old, DTensor):
                        old = old.to_local()
                    room = torch.empty(shape, dtype=getattr(torch, dtype)) if mover.behind else old
                    assert isinstance(room, torch.Tensor)
                    self._new.setdefault(name, {})[key] = room
                    found.append(room)
        return found

    def settle(self, mesh: DeviceMesh) -> None:
        """Installs the new state in the optimizer."""
        for name, parameter in self._parameters.items():
            self._optimizer.state.pop(parameter, None)
            words = self._words.get(name, {})
            if words:
                self._optimizer.state[parameter] = {
                    key: _placed(self._new[name][key], words[key], mesh) for key in words
                }


Words = list[Any]
"""List (kind, dtype, shape, value) that describes an item of state."""


def _described(value: Any, what: str) -> Words:
    if not isinstance(value, torch.Tensor):
        return [NUMBER, "", [], _encoded(value)]
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if not isinstance(value, DTensor):
        return [PLAIN, dtype, shape, None]
    *outer, inner = value.placements
    if any(not isinstance(placement, Replicate) for placement in outer):
        raise ConfigError(f"reshard: {what} of the optimizer is placed as {value.placements}")
    if inner == Shard(0):
        return [SHARDED, dtype, shape, None]
    if isinstance(inner, Replicate):
        return [ALIKE, dtype, shape, None]
    raise ConfigError(f"reshard: {what} of the optimizer is placed as {value.placements}")


def _placed(value: Any, words: Words, mesh: DeviceMesh) -> Any:
    kind, _, shape, _ = words
    if kind not in (SHARDED, ALIKE):
        return value
    outer = [Replicate() for _ in range(mesh.ndim - 1)]
    inner = Shard(0) if kind == SHARDED else Replicate()
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        value, mesh, [*outer, inner], run_check=False, shape=size, stride=stride
    )


def _encoded(value: Any) -> Any:
    """Encodes a value in a list; returns None if the value cannot be sent, so that each rank keeps
    its own value."""
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    if isinstance(value, tuple | list):
        items = [_encoded(item) for item in value]
        return None if None in items else [type(value).__name__, items]
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        return ["tensor", value.tolist(), str(value.dtype).removeprefix("torch.")]
    return None


def _decoded(words: Any) -> Any:
    if words is None:
        return None
    kind, value, *rest = words
    if kind == "tensor":
        return torch.tensor(value, dtype=getattr(torch, rest[0]))
    if kind == "value":
        return value
    items = [_decoded(item) for item in value]
    return tuple(items) if kind == "tuple" else items
