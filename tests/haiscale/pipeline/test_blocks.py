"""A model that calls a list of blocks is divided as it is: masks, rotary embeddings, a tied head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.haiscale.pipeline.test_parity import KINDS, compare, init
from torch import nn
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline import make_subgroups, partition

WORDS, WIDTH, HEADS, ROWS, LENGTH, STEPS, CHUNKS = 13, 8, 2, 8, 6, 3, 4


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind  # the model reads it, also of other stages' blocks
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, turns: tuple[Any, Any]) -> Any:
        query, key, value = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)
        )
        query, key = (one * turns[0] + one.flip(-1) * turns[1] for one in (query, key))
        y = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2)), None


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.linspace(0.1, 1.0, WIDTH // HEADS), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.get_buffer("rate").to(x)
        return angle.cos(), angle.sin()


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.final = nn.LayerNorm(WIDTH)  # registered before the blocks, called behind them
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.layers = nn.ModuleList(Block(("local", "whole")[n % 2]) for n in range(5))
        self.rotary = Rotary()

    def forward(self, ids: torch.Tensor, keep: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.words(ids) * self.scale
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        whole = causal if keep is None else causal & (keep[:, None, None, :] > 0)
        masks = {"whole": whole, "local": whole & ~causal.tril(-3)}
        turns = self.rotary(x)
        layer: Any
        for layer in self.layers[:5]:
            x = layer(x, mask=masks[layer.kind], turns=turns)[0]
        return {"hidden": self.final(x), "cache": None}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.core.words.weight

    def forward(self, ids: torch.Tensor, keep: torch.Tensor | None = None) -> dict[str, Any]:
        return {"logits": self.head(self.core(ids, keep)["hidden"]), "loss": None}


def model() -> Model:
    torch.manual_seed(2)
    return Model().double()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    keep = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    return {
        "keep": keep.long(),
        "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=generator),
    }


def criterion(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def alone() -> tuple[dict[str, Any], list[float]]:
    net, losses = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(STEPS):
        inputs = batch(step)
        optimizer.zero_grad()
        loss = criterion(net(**inputs)["logits"], inputs["ids"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}, losses


def trained(path: str, kind: str, pp: int, checkpoint: str) -> Callable[[int, int], Any]:
    def body(rank: int, world: int) -> Any:
        init(path, rank, world)
        dp, pipe_group = make_subgroups(pp_size=pp)
        chunks = 2 if kind == "interleaved" else 1
        parts = partition(
            model(), pipe_group.rank(), pp,
            blocks="core.layers", sample=batch(9), num_model_chunks=chunks,
        )  # fmt: skip
        if dp.size() > 1:
            parts = DistributedDataParallel(parts, dp)
        pipe = KINDS[kind](parts, CHUNKS, pipe_group, checkpoint=checkpoint)
        optimizer, losses = torch.optim.SGD(pipe.parameters(), lr=0.3), []
        share = ROWS // dp.size()
        mine = slice(dp.rank() * share, (dp.rank() + 1) * share)
        for step in range(STEPS):
            inputs = {name: value[mine] for name, value in batch(step).items()}
            optimizer.zero_grad()
            loss, outputs = pipe.forward_backward(inputs, criterion=criterion, labels=inputs["ids"])
            assert outputs.shape == (share, LENGTH, WORDS)
            optimizer.step()
            losses.append(loss.item())
        return {name: tensor.numpy() for name, tensor in pipe.state_dict().items()}, losses

    return body


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "pp", "ranks", "checkpoint"),
    [
        ("zb-h1", 2, 2, "never"),
        ("1f1b", 3, 3, "always"),
        ("interleaved", 2, 2, "except_last"),
        ("gpipe", 2, 4, "never"),
    ],
)
def test_a_divided_model_equals_the_whole_one(
    start_gang: Callable[..., Any], store_path: str, kind: str, pp: int, ranks: int, checkpoint: str
) -> None:
    compare(start_gang(trained(store_path, kind, pp, checkpoint), ranks).results(), alone())


def test_parameters_lie_where_the_model_calls_them() -> None:
    whole = model()
    stages = [partition(whole, n, 3, blocks="core.layers", sample=batch(0)) for n in range(3)]
    outside = [[n for n, _ in s.named_parameters() if ".layers." not in n] for s in stages]
    assert outside[0] == ["core.scale", "core.words.weight"]
    assert outside[1] == [], "a middle stage holds its blocks alone"
    assert outside[2] == ["core.scale", "core.final.weight", "core.final.bias", "head.weight"]
    assert stages[0].tied == (
        ((0, "core.scale"), (2, "core.scale")),
        ((0, "core.words.weight"), (2, "head.weight")),
    )
    assert sum(stages[0].sizes) == 5
    blocks = sum(
        len({name.split(".")[2] for name in s.state_dict() if "layers" in name}) for s in stages
    )
    assert blocks == 5
    timed = partition(whole, 0, 2, blocks="core.layers", sample=batch(0), balance="time")
    assert sum(timed.sizes) == 5
    assert set(whole.state_dict()) == {n for s in stages for n in s.state_dict()}


class Skips(Core):
    """Adds the embeddings again behind the blocks."""

    def forward(self, ids: torch.Tensor, keep: torch.Tensor | None = None) -> dict[str, Any]:
        found = super().forward(ids, keep)
        return {"hidden": found["hidden"] + self.words(ids)}


class Depends(Core):
    """The mask depends on the embeddings."""

    def forward(self, ids: torch.Tensor, keep: torch.Tensor | None = None) -> dict[str, Any]:
        return super().forward(ids, (self.words(ids).sum(-1) > 0).long())


class Adds(Core):
    """Computes between two blocks."""

    def forward(self, ids: torch.Tensor, keep: torch.Tensor | None = None) -> dict[str, Any]:
        x, masks = self.words(ids), torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, mask=masks, turns=self.rotary(x))[0] + 1
        return {"hidden": x}


@pytest.mark.parametrize(
    ("core", "options", "words"),
    [
        (Core, {"blocks": "core.blocks"}, "invalid blocks 'core.blocks'"),
        (Core, {"blocks": "core.words"}, "expected the name of a ModuleList or a Sequential"),
        (Core, {"sample": None}, "needs sample=, a dict of input tensors"),
        (Core, {"sample": {"ids": torch.ones(2, 3)}}, "Model cannot take the sample"),
        (Core, {"size": 6}, "it has 5 blocks, fewer than 6 stages"),
        (Core, {"balance": [2, 2]}, "the sum 5, the module's number of blocks"),
        (Adds, {}, "block 1 does not take the hidden states of block 0"),
        (Depends, {}, "its stages return something else than the whole"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_divided_is_refused(
    core: type[Core], options: dict[str, Any], words: str
) -> None:
    whole = model()
    whole.core = core().double()
    arguments = {"size": 2, "blocks": "core.layers", "sample": batch(0), **options}
    with pytest.raises(ConfigError, match=words):
        partition(whole, 0, **arguments)


def test_a_module_used_before_and_behind_the_blocks_lies_on_both_ends() -> None:
    whole = model()
    whole.core = Skips().double()
    stages = [partition(whole, n, 2, blocks="core.layers", sample=batch(0)) for n in range(2)]
    assert all("core.words.weight" in stage.state_dict() for stage in stages)


def test_inputs_of_other_names_are_refused(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        stage = partition(model(), 0, 1, blocks="core.layers", sample=batch(0))
        pipe = KINDS["gpipe"](stage, CHUNKS)
        inputs = batch(0)
        pipe.evaluate((inputs["keep"], inputs["ids"]))
        with pytest.raises(ConfigError, match="expected the inputs keep, ids, got ids"):
            pipe.evaluate({"ids": inputs["ids"]})

    start_gang(body, 1).results()
