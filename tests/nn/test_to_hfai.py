"""Models after to_hfai: same bits, fewer bytes, under every wrapper; the way back."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import StartGang
from tests.nn.blocks import Block, resnet, transformer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fireflyer.nn as hn
from fireflyer.errors import ConfigError
from fireflyer.nn.modules import CastingRmsNorm


def gpt() -> tuple[Any, Tensor]:
    return transformer(), torch.randn(2, 8, 32)


def relu_block() -> tuple[Any, Tensor]:
    return transformer(nn.ReLU), torch.randn(2, 8, 32)


def llama() -> tuple[Any, Tensor]:
    return transformer(nn.SiLU, norm=nn.RMSNorm), torch.randn(2, 8, 32)


def images() -> tuple[Any, Tensor]:
    return resnet(), torch.randn(4, 3, 16, 16)


MODELS: dict[str, tuple[Callable[[], tuple[Any, Tensor]], float]] = {
    "gpt": (gpt, 0.66),
    "relu": (relu_block, 0.9),
    "llama": (llama, 0.66),
    "resnet": (images, 0.75),
}


def train(model: Any, x: Tensor, steps: int = 3, lower: bool = False) -> list[Tensor]:
    """Losses of some steps, then the parameters and buffers."""
    adam = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            loss = model(x).float().square().mean()
        loss.backward()
        adam.step()
        found.append(loss.detach())
    return [*found, *(t.detach() for t in (*model.parameters(), *model.buffers()))]


def assert_equal(mine: list[Tensor], its: list[Tensor]) -> None:
    assert len(mine) == len(its)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lower", [False, True], ids=["float32", "autocast"])
def test_a_model_trains_to_the_same_bits(name: str, lower: bool) -> None:
    model, x = MODELS[name][0]()
    mine = hn.to_hfai(copy.deepcopy(model))
    assert_equal(train(mine, x, lower=lower), train(model, x, lower=lower))


class CastingNorm(nn.Module):
    """Llama's norm as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48))
        self.variance_epsilon = 1e-6

    def forward(self, input: Tensor) -> Tensor:
        h = input.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(input.dtype)


class Residual(nn.Module):
    """Three blocks, each of which adds to its input a product of the input's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(CastingNorm() for _ in range(3))
        self.products = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x))
        return x


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_transformers_trains_to_the_same_bits(dtype: torch.dtype, lower: bool) -> None:
    """Its gradient is two summands, which join that of the residual one after the other."""
    torch.manual_seed(3)
    model, x = Residual().to(dtype), torch.randn(64, 48, dtype=dtype)
    mine = hn.to_hfai(copy.deepcopy(model))
    for norm in mine.norms:
        norm.__class__ = type("Ours", (CastingRmsNorm, CastingNorm), {})
    assert_equal(train(mine, x, lower=lower), train(model, x, lower=lower))


@pytest.mark.parametrize("name", MODELS)
def test_fewer_bytes_are_kept(name: str) -> None:
    make, most = MODELS[name]
    model, x = make()
    before = hn.saved(model, x)
    after = hn.saved(hn.to_hfai(model), x)
    assert after.bytes <= most * before.bytes
    assert sum(after.modules.values()) == after.bytes
    assert hn.saved(hn.to_torch(model), x) == before


def test_dropout_costs_nothing() -> None:
    model, x = transformer(p=0.1), torch.randn(2, 8, 32)
    before, after = hn.saved(model, x).bytes, hn.saved(hn.to_hfai(model), x).bytes
    assert after / before < 0.57
    assert after == hn.saved(hn.to_hfai(transformer()), x).bytes


def test_linear_outputs_computed_again() -> None:
    for act, most in ((nn.GELU, 0.40), (nn.ReLU, 0.50)):
        model, x = transformer(act, 0.1), torch.randn(2, 8, 32)
        before = hn.saved(model, x).bytes
        mine = hn.to_hfai(copy.deepcopy(model), recompute_linear=True)
        assert hn.saved(mine, x).bytes <= most * before
    model, x = gpt()
    mine = hn.to_hfai(copy.deepcopy(model), recompute_linear=True)
    for lower in (False, True):
        assert_equal(train(mine, x, lower=lower), train(model, x, lower=lower))


def test_autocast_keeps_no_copies() -> None:
    model, x = gpt()
    with torch.autocast("cpu", torch.bfloat16):
        before, after = hn.saved(model, x).bytes, hn.saved(hn.to_hfai(model), x).bytes
    assert after < 0.9 * before


def test_nothing_is_stored_in_the_model() -> None:
    model, _ = images()
    names = list(model.state_dict())
    mine = hn.to_hfai(copy.deepcopy(model))
    assert list(mine.state_dict()) == names
    for each in (mine, hn.to_hfai(nn.Sequential(Named(4, 4)))):
        classes = [type(m) for m in each.modules()]
        assert [type(m) for m in pickle.loads(pickle.dumps(each)).modules()] == classes
        assert [type(m) for m in copy.deepcopy(each).modules()] == classes
    model.load_state_dict(mine.state_dict())
    assert str(mine) == str(model)


def test_the_way_back() -> None:
    model, _ = images()
    before = [(type(m), set(vars(m))) for m in model.modules()]
    hn.to_hfai(hn.to_hfai(model, strict=True))
    assert type(model[0]) is not nn.Conv2d
    hn.to_torch(model)
    assert [(type(m), set(vars(m))) for m in model.modules()] == before


class Doubled(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Named(nn.Linear):
    """A class of its own with torch's forward."""


def test_forwards_of_their_own_are_left_alone_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = nn.Sequential(Named(4, 4), Doubled(), nn.ReLU(), nn.Linear(4, 4))
    model[3].forward = functional.relu
    x = torch.randn(3, 4)
    expected = model(x)
    hn.to_hfai(model, verbose=True, example=(x,))
    said = capsys.readouterr().err
    assert "replaced 1 Named, 1 ReLU\n" in said
    assert "not replaced, it overrides forward: 1 (Doubled)" in said
    assert "not replaced, it overrides forward: 3 (Linear)" in said
    assert "kept for backward" in said
    assert isinstance(model[0], Named)
    assert torch.equal(model(x), expected)
    assert type(hn.to_torch(model)[0]) is Named


def test_strict() -> None:
    model = hn.to_hfai(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), strict=True)
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ConfigError, match="relu: device meta has no kernel"):
        model.to("meta")(torch.randn(3, 4, device="meta"))


def test_functions_are_replaced_and_restored() -> None:
    names = vars(functional).copy()
    with hn.set_replace_torch():
        assert functional.relu is hn.functional.relu
        hn.set_replace_torch(strict=True)
        with pytest.raises(ConfigError):
            functional.relu(torch.ones(2, device="meta", requires_grad=True))
        layer = nn.Linear(8, 8)
        x = torch.randn(5, 8, requires_grad=True)
        y = functional.relu(layer(functional.gelu(x)))
        y.sum().backward()
        functional.max_pool2d(torch.randn(1, 4, 4, requires_grad=True), 2).sum().backward()
        kernel = torch.randn(2, 1, 3, 3, requires_grad=True)
        image = functional.gelu(torch.randn(1, 1, 4, 4, requires_grad=True))
        assert functional.conv2d(image, weight=kernel, padding=1).shape == (1, 2, 4, 4)
    assert vars(functional) == names


def test_an_input_changed_in_place_is_an_error() -> None:
    model: Any = hn.to_hfai(nn.Sequential(nn.GELU(), nn.Linear(4, 4)))
    norm, layer = model
    x = torch.randn(3, 4, requires_grad=True) * 1
    y = layer(norm(x)).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.backward()
    frozen = torch.randn(3, 4)
    norm.requires_grad_(False)
    middle = norm(frozen.requires_grad_(False) + torch.zeros(1, requires_grad=True))
    middle.add_(1)  # the recipe is void, the value counts
    layer(middle).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, middle.detach().sum(0).expand(4, 4))


def test_backward_twice_and_retained() -> None:
    model, x = gpt()
    mine = hn.to_hfai(copy.deepcopy(model))
    grads = []
    for each in (model, mine):
        leaf = x.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            loss = each(leaf).square().mean()
            (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
            loss.backward(retain_graph=True)
            g.square().sum().backward()
        grads.append([leaf.grad, *(p.grad for p in each.parameters())])
    assert_equal(*grads)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    def losses(model: Any, x: Tensor, again: bool) -> list[Tensor]:
        torch.manual_seed(5)
        run = (lambda x: checkpoint(model, x, use_reentrant=reentrant)) if again else model
        loss = run(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    model = hn.to_hfai(transformer(p=0.2))
    x = torch.randn(2, 8, 32, requires_grad=True)
    plain, again = (losses(copy.deepcopy(model), x, again) for again in (False, True))
    assert_equal(plain, again)
    if not reentrant:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: x):
            checkpoint(model, x, use_reentrant=False)
        assert len(kept) <= 2  # the input and the generator's state


def test_functorch_gets_torchs_operators() -> None:
    model, x = gpt()
    mine = hn.to_hfai(copy.deepcopy(model))
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], each: nn.Module) -> Tensor:
        out: Tensor = torch.func.functional_call(each, parameters, (x,))
        return out.square().mean()

    mine_g, its_g = (torch.func.grad(loss)(parameters, each) for each in (mine, model))
    assert_equal(list(mine_g.values()), list(its_g.values()))
    assert torch.equal(torch.vmap(mine[0].act)(x), model[0].act(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traces_have_torchs_operators() -> None:
    model, x = images()
    mine = hn.to_hfai(copy.deepcopy(model)).eval()
    expected = model.eval()(x)
    assert torch.equal(torch.jit.trace(mine, x)(x), expected)
    layers: Any = hn.to_hfai(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.RMSNorm(4)))
    its = hn.to_torch(copy.deepcopy(layers))
    tangents = []
    for each in (layers, its):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(3, 4), torch.ones(3, 4))
            tangents.append(torch.autograd.forward_ad.unpack_dual(each(dual)).tangent)
    assert torch.equal(*tangents)


@pytest.mark.parametrize("name", MODELS)
def test_inference_mode(name: str) -> None:
    model, x = MODELS[name][0]()
    mine = hn.to_hfai(copy.deepcopy(model))
    with torch.inference_mode():
        assert torch.equal(mine(x), model(x))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_modules_that_have_seen_no_input_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = hn.to_hfai(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), verbose=True)
    assert "not replaced, it has seen no input yet: 1 (LazyLinear)" in capsys.readouterr().err
    x = torch.randn(5, 4)
    y = model(x)
    assert y.shape == (5, 3)
    assert torch.equal(hn.to_hfai(model)(x), y)
    assert type(model[1]) is not nn.Linear


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_has_no_graph_break() -> None:
    model, x = gpt()
    mine = torch.compile(hn.to_hfai(copy.deepcopy(model)), fullgraph=True, backend="aot_eager")
    assert_equal(train(mine, x), train(model, x))


def _wrapped(kind: str, model: Any) -> Any:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_sharded_and_replicated(kind: str, start_gang: StartGang, tmp_path: Any) -> None:
    def body(rank: int, world: int) -> bool:
        store = torch.distributed.FileStore(str(tmp_path / "store"), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
        try:
            model, x = gpt()
            torch.manual_seed(rank)
            x = torch.randn_like(x)
            mine = _wrapped(kind, hn.to_hfai(copy.deepcopy(model)))
            its = _wrapped(kind, model)
            pairs = zip(train(mine, x), train(its, x), strict=True)
            return all(torch.equal(*(_local(t) for t in pair)) for pair in pairs)
        finally:
            torch.distributed.destroy_process_group()

    assert start_gang(body, 2).results() == [True, True]


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def test_a_changed_class_is_not_undone() -> None:
    model = hn.to_hfai(nn.Sequential(nn.Linear(4, 4)))
    model[0].__class__ = type("FSDPLinear", (type(model[0]),), {})
    with pytest.raises(ConfigError, match="0: its class became FSDPLinear after to_hfai"):
        hn.to_torch(model)


def test_inference_keeps_no_inputs_alive() -> None:
    model, x = gpt()
    hn.to_hfai(model)
    with torch.no_grad(), contextlib.nullcontext():
        y = model[0].act(x)
    assert not [name for name in vars(y) if "recipe" in name]
    assert isinstance(model[0], Block)
