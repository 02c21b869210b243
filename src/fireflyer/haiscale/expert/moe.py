"""Mixture-of-experts layer whose experts are split over the ranks of a mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.copies import Uncopied
from fireflyer.haiscale.expert.dispatch import Dispatcher, Pairs
from fireflyer.haiscale.expert.experts import Experts, replicated_gradients
from fireflyer.haiscale.expert.groups import expert_mesh
from fireflyer.haiscale.expert.rebalance import placement_of
from fireflyer.haiscale.expert.router import Router
from fireflyer.haiscale.validation import check_count, given


class MoE(Uncopied):
    """Feed-forward layer in which a router sends each token to `top_k` of `experts` experts.

    The constructor is collective. Each rank of the mesh has its own tokens.

    Args:
        features, hidden: width of a token, and width inside an expert.
        experts: number of experts, a multiple of the number of ranks.
        top_k: number of experts per token, at most 255.
        shared: number of experts that every token uses; replicated.
        replicas: number of physical slots of all ranks, a multiple of the number of ranks; default:
            `experts`.
        wire: dtype of tokens between hosts, for example torch.bfloat16; None keeps the tokens'
            dtype.
        mesh: ranks that share the experts: one dimension, or several with one named "ep". Default:
            all ranks.

    Attributes:
        aux_loss: auxiliary balancing loss of the last forward, 1 if loads are even. Add it to the
            loss with a small factor.
        loads: (experts,) number of tokens that each expert received on all ranks since
            `take_loads`.

    Raises:
        ConfigError: the ranks do not divide `experts` or `replicas`, or a count is out of range.
    """

    loads: torch.Tensor

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        shared: int = 0,
        replicas: int | None = None,
        wire: torch.dtype | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        mesh = expert_mesh(mesh)
        slots = experts if replicas is None else replicas
        _check(features, hidden, experts, top_k, shared, slots, mesh.size(), wire)
        self.router = Router(features, experts, top_k)
        self.experts = Experts(features, hidden, experts, slots, mesh)
        groups, group = self.experts.groups, self.experts.group
        groups.run(dist.broadcast, self.router.weight.detach(), group=group, group_src=0)
        self.shared = _SwiGLU(features, shared * hidden) if shared else None
        for parameter in self.shared.parameters() if self.shared else ():
            groups.run(dist.broadcast, parameter.detach(), group=group, group_src=0)
        self.dispatcher = Dispatcher(groups, self.experts.local, wire)
        self._log2phy, self._copies = _tables(self.experts)
        self.register_buffer("loads", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.aux_loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output, shaped like `x`: (..., features). Collective.

        Raises:
            ConfigError: `x` has another width, or router logits of any rank are NaN or infinite
                (raised on all ranks).
            RankFailed, CollectiveError: a rank has died; raised on all ranks.
        """
        if x.shape[-1] != self.router.weight.shape[1]:
            raise ConfigError(
                f"invalid x {tuple(x.shape)}: expected (..., {self.router.weight.shape[1]})"
            )
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen, weights = self.router(tokens)
        self._count(scores, chosen)
        turn = torch.arange(len(tokens))[:, None] + self.experts.group.rank()
        slots = self._log2phy[chosen, turn % self._copies[chosen]]
        row = torch.arange(len(tokens)).repeat_interleave(self.router.top_k)
        pairs = Pairs(row, slots.flatten(), weights.flatten())
        rows, mine, way = self.dispatcher.dispatch(tokens, pairs)
        result = self.dispatcher.combine(self._computed(rows, mine), way)
        if self.shared is not None:
            result = result + self.shared(tokens)
        return result.view(x.shape)

    def _computed(self, rows: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """Returns, for each row, the weighted sum of the results of this rank's experts."""
        local = pairs.slot - self.experts.group.rank() * self.experts.local
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=self.experts.local)
        results = self.experts(rows.index_select(0, pairs.row[order]), counts)
        results = results * pairs.weight[order].unsqueeze(-1).to(results.dtype)
        return torch.zeros_like(rows).index_add(0, pairs.row[order], results)

    def _count(self, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """Adds up loads and computes the auxiliary loss, both from sums over all ranks."""
        experts, ranks = scores.shape[1], self.experts.group.size()
        broken = int(not scores.detach().isfinite().all())
        loads = torch.bincount(chosen.flatten(), minlength=experts)
        counts = torch.cat((loads, torch.tensor([len(scores), broken])))
        self.experts.groups.run(dist.all_reduce, counts, group=self.experts.group)
        if counts[-1]:
            raise ConfigError(
                f"router logits are NaN or infinite on {int(counts[-1])} of {ranks} ranks: lower the "
                "learning rate, or clip gradients"
            )
        self.loads += counts[:-2]
        tokens = int(counts[-2].clamp(min=1))
        used = counts[:-2].to(scores.dtype) / (tokens * self.router.top_k)
        self.aux_loss = experts * (used * scores.sum(0)).sum() * ranks / tokens

    def take_loads(self) -> torch.Tensor:
        """Returns `loads` and sets them to zero."""
        taken = self.loads.clone()
        self.loads.zero_()
        return taken

    def place(self, phy2log: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Moves experts to other slots, between two steps. Collective.

        Args:
            phy2log: (replicas,) expert of each slot, a row of the result of `rebalance_experts`.
            optimizer: optimizer whose state of the experts moves, too.
        """
        self.experts.place(phy2log, optimizer)
        self._log2phy, self._copies = _tables(self.experts)


def average_gradients(module: nn.Module, data: ProcessGroup | None = None) -> None:
    """Averages gradients: afterwards they are the gradients of the mean of all ranks' losses.
    Collective.

    Gradients of experts are averaged over the ranks that hold the same experts, all other gradients
    over all ranks.

    Args:
        data: ranks with the same experts; None if each expert exists in only one mesh.
    """
    layers = [part for part in module.modules() if isinstance(part, MoE)]
    if not layers:
        raise ConfigError("average_gradients: the module has no MoE layer")
    groups = layers[0].experts.groups
    ranks = groups.everyone.size()
    total = ranks * (1 if data is None else data.size())

    def mean(gradient: torch.Tensor) -> None:
        if data is not None:
            groups.run(dist.all_reduce, gradient, group=data)
        gradient.div_(total)

    split: set[nn.Parameter] = set()
    for layer in layers:
        replicated_gradients(layer.experts, mean)
        split.update(layer.experts.parameters())
    for parameter in module.parameters():
        if parameter in split or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        groups.run(dist.all_reduce, gradient, group=groups.everyone)
        mean(gradient)


class _SwiGLU(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(features, hidden, bias=False)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


def _tables(experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    placement = placement_of(experts.phy2log[None], experts.experts)
    return placement.log2phy[0], placement.logcnt[0]


def _check(
    features: int, hidden: int, experts: int, top_k: int, shared: int, slots: int, ranks: int,
    wire: object,
) -> None:  # fmt: skip
    check_count("features", features, 1)
    check_count("hidden", hidden, 1)
    check_count("experts", experts, 1)
    check_count("top_k", top_k, 1)
    check_count("shared", shared, 0)
    if top_k > min(experts, 255):
        raise ConfigError(f"invalid top_k {top_k}: expected at most {min(experts, 255)}")
    if experts % ranks:
        raise ConfigError(f"{ranks} ranks do not divide {experts} experts")
    if wire is not None and not isinstance(wire, torch.dtype):
        raise ConfigError(
            f"invalid wire {given(wire)}: expected a dtype such as torch.bfloat16, or None"
        )
    check_count("replicas", slots, 1)
    if slots < experts or slots % ranks or slots > 32767:
        raise ConfigError(
            f"invalid replicas {slots}: expected a multiple of {ranks} ranks from {experts} to 32767"
        )
