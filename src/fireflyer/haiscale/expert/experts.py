"""Feed-forward experts of one rank, in stacked parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.expert.groups import ExpertGroups
from fireflyer.haiscale.tensor.layers import ShardedLayer

NAMES = ("gate", "up", "down")


class Experts(ShardedLayer):
    """SwiGLU experts: down(silu(gate x) * up x). A slot is the place of one replica of an expert.
    Each rank holds the experts of `slots / ranks` slots.

    States hold all experts in the order of their numbers, regardless of their slots: (experts,
    ...).

    Attributes:
        phy2log: (slots,) expert of each physical slot, equal on all ranks.
    """

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self, features: int, hidden: int, experts: int, slots: int, mesh: DeviceMesh
    ) -> None:
        super().__init__(mesh, dict.fromkeys(NAMES, 0))
        self.groups = ExpertGroups(self.group)
        self.experts, self.local = experts, slots // self.group.size()
        self.phy2log = torch.arange(slots) % experts
        word = torch.randint(2**31, (1,))  # seed: the experts are equal on any number of ranks
        self.groups.run(dist.broadcast, word, group=self.group, group_src=0)
        shapes = {
            "gate": (hidden, features),
            "up": (hidden, features),
            "down": (features, hidden),
        }
        for number, (name, shape) in enumerate(shapes.items()):
            drawn = [
                torch.randn(
                    shape,
                    generator=torch.Generator().manual_seed(3 * (int(word) + expert) + number),
                )
                for expert in self.held.tolist()
            ]
            setattr(self, name, nn.Parameter(torch.stack(drawn) / shape[1] ** 0.5))

    @property
    def held(self) -> torch.Tensor:
        """Experts of this rank's slots."""
        first = self.group.rank() * self.local
        return self.phy2log[first : first + self.local]

    def forward(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns each row's result from the expert in its slot.

        Args:
            rows: (rows, features), sorted by slot.
            slots: (slots of this rank,) number of rows of each slot.
        """
        results = [
            functional.linear(
                functional.silu(functional.linear(part, gate)) * functional.linear(part, up), down
            )
            for part, gate, up, down in zip(
                rows.split(slots.tolist()), self.gate, self.up, self.down, strict=True
            )
        ]
        return torch.cat(results)

    def place(self, phy2log: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        """Moves parameters, and their state in `optimizer`, to other slots. Collective.

        Raises:
            ConfigError: the number of slots differs, or an expert has no slot.
        """
        slots = self.phy2log.numel()
        if phy2log.shape != (slots,) or set(phy2log.tolist()) != set(range(self.experts)):
            raise ConfigError(
                f"invalid placement: expected an expert for each of {slots} slots, and a slot for "
                f"each of {self.experts} experts"
            )
        with torch.no_grad():
            for name in NAMES:
                parameter: nn.Parameter = getattr(self, name)
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                held = [value for value in state.values() if isinstance(value, torch.Tensor)]
                for tensor in (parameter, *held):
                    if tensor.shape == parameter.shape:
                        tensor.copy_(self._moved(tensor, phy2log))
        self.phy2log = phy2log.clone()

    def _moved(self, tensor: torch.Tensor, phy2log: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `tensor` that this rank holds if the slots become `phy2log`.
        Collective."""
        ranks, me = self.group.size(), self.group.rank()
        source = {int(e): s for s, e in reversed(list(enumerate(self.phy2log.tolist())))}
        wanted = phy2log.view(ranks, -1).tolist()  # experts by rank
        giving = [
            [source[e] - me * self.local for e in part if source[e] // self.local == me]
            for part in wanted
        ]
        origin = torch.tensor([source[e] // self.local for e in wanted[me]])
        places = origin.argsort(stable=True)
        rows = tensor[torch.tensor([row for part in giving for row in part], dtype=torch.int64)]
        got = self.groups.swap(
            rows,
            [len(part) for part in giving],
            torch.bincount(origin, minlength=ranks).tolist(),
            self.groups.everyone,
        )
        result = torch.empty_like(got)
        result[places] = got
        return result

    def square_of(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        copies = torch.bincount(self.phy2log, minlength=self.experts)[self.held]
        squares: torch.Tensor = piece.double().square().flatten(1).sum(1) / copies
        return squares.sum()

    def whole_of(self, name: str, piece: torch.Tensor) -> DTensor:
        home = torch.arange(self.experts)
        if not torch.equal(self.phy2log, home):
            piece = self._moved(piece.detach(), home)
        return super().whole_of(name, piece)

    def piece_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if torch.equal(self.phy2log, torch.arange(self.experts)):
            return super().piece_of(name, whole)
        plain = whole.full_tensor() if isinstance(whole, DTensor) else whole
        return plain[self.held]

    def whole_shape(self, name: str) -> torch.Size:
        return torch.Size((self.experts, *getattr(self, name).shape[1:]))


def replicated_gradients(layer: Experts, average: Callable[[torch.Tensor], Any]) -> None:
    """Gives all replicas of an expert the sum of their gradients. Collective.

    Args:
        average: called first with each gradient; works in place.
    """
    counts = torch.bincount(layer.phy2log, minlength=layer.experts)
    several = (counts > 1).nonzero().flatten()
    position = torch.full((layer.experts,), -1)
    position[several] = torch.arange(len(several))
    mine = position[layer.held]
    copied = (mine >= 0).nonzero().flatten()
    for name in NAMES:
        parameter: nn.Parameter = getattr(layer, name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        average(gradient)
        if len(several):
            total = gradient.new_zeros(len(several), *gradient.shape[1:])
            total.index_add_(0, mine[copied], gradient[copied])
            layer.groups.run(dist.all_reduce, total, group=layer.group)
            gradient[copied] = total[mine[copied]]
