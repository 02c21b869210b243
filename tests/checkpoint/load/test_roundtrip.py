"""What is saved is what is loaded, to the bit; what cannot be saved is named."""

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.checkpoint import CheckpointManager, Shard
from fireflyer.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int32,
    torch.int64,
]
Differences = Callable[[Any, Any], list[str]]
numbers = itertools.count()


def tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...], view: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    stored = (*shape[:-1], 2 * shape[-1]) if view == "strided" and shape else shape
    count = int(np.prod(stored, dtype=int))
    if dtype == torch.bool:
        made = torch.randint(0, 2, (count,), generator=generator).bool()
    else:
        size = torch.empty((), dtype=dtype).element_size()
        made = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(
            dtype
        )
    made = made.reshape(stored)
    if view == "strided" and shape:
        return made[..., ::2]
    if view == "transposed" and len(shape) > 1:
        return made.transpose(0, 1)
    return made


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(
    tensor,
    st.integers(0, 1000),
    st.sampled_from(DTYPES),
    shapes,
    st.sampled_from(["plain", "strided", "transposed"]),
)
arrays = st.builds(
    lambda seed, dtype, shape: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
    st.integers(0, 1000),
    st.sampled_from(["<f4", ">f8", "u1", "<i8", "?", "<c8", "<U3", "<M8[s]"]),
    shapes,
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.binary(max_size=8),
)
keys = st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1))
states = st.recursive(
    st.one_of(scalars, tensors, arrays),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=cases(150), deadline=None)
def test_any_tree_comes_back_exactly(differences: Differences, state: Any) -> None:
    manager = CheckpointManager(f"memory://roundtrip-{next(numbers)}")
    manager.save(7, state).wait()
    assert differences(state, CheckpointManager(manager._catalog.storage).load()) == []


def test_a_training_state_comes_back_and_fills_another_model(
    tmp_path: Any, differences: Differences
) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": np.random.RandomState(3).get_state(),
        "step": 1,
    }
    manager = CheckpointManager(tmp_path)
    manager.save(1, state).wait()
    loaded = manager.load()
    assert differences({**state, "model": dict(net.state_dict())}, loaded) == []
    assert all(type(key) is int for key in loaded["optimizer"]["state"])

    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    addresses = [value.data_ptr() for value in other.state_dict().values()]
    back = manager.load(into={"model": other.state_dict()})
    assert [value.data_ptr() for value in other.state_dict().values()] == addresses
    assert differences(dict(net.state_dict()), dict(other.state_dict())) == []
    assert back["model"]["0.weight"].data_ptr() == other.state_dict()["0.weight"].data_ptr()
    torch.optim.AdamW(other.parameters()).load_state_dict(back["optimizer"])


def test_tensors_that_share_memory_are_saved_each(tmp_path: Any) -> None:
    base = torch.arange(6.0)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": base, "b": base[2:4], "c": base.expand(2, 6)}).wait()
    loaded = manager.load()
    assert loaded["b"].tolist() == [2.0, 3.0]
    assert loaded["c"].shape == (2, 6)
    loaded["a"].zero_()
    assert loaded["b"].tolist() == [2.0, 3.0]


def test_lazy_conjugates_and_negatives_are_saved_as_their_values(tmp_path: Any) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    manager = CheckpointManager(tmp_path)
    manager.save(1, [value.conj(), value.conj().imag]).wait()
    conjugate, negative = manager.load()
    assert conjugate.tolist() == [1 - 2j, 3 + 4j]
    assert negative.tolist() == [-2.0, 4.0]


def test_into_fills_what_is_not_contiguous_and_parameters(tmp_path: Any) -> None:
    manager = CheckpointManager(tmp_path)
    saved = torch.arange(6.0).reshape(2, 3)
    manager.save(1, {"t": saved, "p": saved, "n": np.arange(4)}).wait()
    transposed = torch.zeros(3, 2).t()
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    array = np.zeros(8, dtype=np.int64)[::2]
    back = manager.load(into={"t": transposed, "p": parameter, "n": array})
    assert back["t"] is transposed
    assert back["p"] is parameter
    assert torch.equal(transposed, saved)
    assert torch.equal(parameter.detach(), saved)
    assert array.tolist() == [0, 1, 2, 3]


def test_autograd_sees_that_load_has_changed_a_tensor(tmp_path: Any) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.full((3,), 7.0), "d": np.zeros(2)}).wait()
    weight, factor = torch.ones(3), torch.ones(3, requires_grad=True)
    product = (weight * factor).sum()
    manager.load(into={"w": Shard(weight, (3,), (0,)), "d": np.ones(2)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        fixed = torch.ones(3)
    manager.load(into={"w": fixed})
    assert fixed.tolist() == [7.0] * 3


class Subclass(torch.Tensor):
    """Not a plain tensor."""


def looped() -> list[Any]:
    """A list in a tuple in the list."""
    loop: list[Any] = []
    loop.append((loop,))
    return loop


def holding_itself() -> dict[str, Any]:
    state: dict[str, Any] = {"other": {}}
    state["self"] = state
    return state


def nested(depth: int) -> list[Any]:
    """That many lists, each in the next."""
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {"b": [1, object()]}}, r"a\.b\[1\]"),
        ({"set": {1, 2}}, "set"),
        ({"d": defaultdict(list)}, "d"),
        ({("t", 1): 2}, "key"),
        ({True: 2}, "key"),
        ({2**63: 2}, "key"),
        ({"o": np.array([object()])}, "o"),
        ({"s": torch.eye(2).to_sparse()}, "s"),
        ({"m": torch.empty(2, device="meta")}, "m"),
        ({"a": {"q": torch.zeros(3, dtype=torch.uint8).view(torch.quint8)}}, r"a\.q: .*quint8"),
        ({"c": torch.zeros(1).as_subclass(Subclass)}, "c"),
        ({"u": "\ud800"}, "u"),
        ({"\ud800": 1}, "Unicode"),
        ({"n": np.float32(1.0)}, "n"),
        ({"a": [1, looped()]}, r"a\[1\]\[0\]\[0\]: it is a\[1\] itself"),
        (holding_itself(), r"self: it is \(the state itself\) itself"),
        ({"a": nested(200)}, r"a\[0\]\[0\]\.\.\.: it is nested more than 200 levels"),
        ({"a": nested(100_000)}, "nested more than 200 levels"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Any, state: Any, name: str) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=f"cannot save .*{name}"):
        manager.save(1, state)
    assert manager.steps() == []
    manager.save(2, OrderedDict(fine=1)).wait()
    assert manager.load() == {"fine": 1}


def freed(kept: int) -> torch.Tensor:
    """The last 10 of 20 elements, of which the storage holds only as many as `kept` still."""
    tensor = torch.ones(20)[10:]
    tensor.untyped_storage().resize_(4 * kept)
    return tensor


@pytest.mark.parametrize("kept", [0, 10, 19])
def test_a_tensor_whose_memory_was_freed_is_named(tmp_path: Any, kept: int) -> None:
    manager = CheckpointManager(tmp_path)
    state = {"a": torch.ones(3), "b": {"c": torch.ones(20)[10:]}}
    for attempt in range(3):  # the layout is new, then known
        with pytest.raises(
            CheckpointError, match=rf"cannot save b\.c: .*freed.*80.* has {4 * kept}$"
        ):
            manager.save(9, {"a": state["a"], "b": {"c": freed(kept)}})
        manager.save(attempt, state).wait()
    with pytest.raises(CheckpointError, match=r"cannot load into b\.c: .*freed"):
        manager.load(into={"b": {"c": freed(kept)}})
    with pytest.raises(CheckpointError, match=r"cannot save w: .*freed"):
        manager.save(9, {"w": freed(kept)})
    assert manager.steps() == [0, 1, 2]


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"w": torch.zeros(3)}, r"cannot load w .*float32 \[2\].*given one is torch float32 \[3\]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "cannot load w .*float64"),
        ({"w": np.zeros(2, np.float32)}, "cannot load w .*numpy"),
        ({"missing": torch.zeros(2)}, "a tensor missing"),
        ({"step": torch.zeros(2)}, "a tensor step"),
    ],
)
def test_into_that_does_not_fit_is_named_and_left_alone(
    tmp_path: Any, into: Any, message: str
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(2), "step": 1}).wait()
    with pytest.raises(CheckpointError, match=message):
        manager.load(into=into)
    assert all(not leaf.any() for leaf in into.values())
    assert manager.latest() == 1


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(1).expand(4),
        torch.zeros(2, 1).expand(2, 2),
        torch.zeros(5).as_strided((4,), (0,)),
        torch.zeros(5).unfold(0, 2, 1),
        np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)),
        np.lib.stride_tricks.as_strided(np.zeros(5), (4,), (4,)),
    ],
)
def test_into_whose_elements_share_memory_is_refused(tmp_path: Any, target: Any) -> None:
    manager = CheckpointManager(tmp_path)
    saved = np.arange(4.0) if isinstance(target, np.ndarray) else torch.arange(target.numel() * 1.0)
    manager.save(1, {"w": saved.reshape(target.shape)}).wait()
    with pytest.raises(CheckpointError, match=r"cannot load w .*share memory"):
        manager.load(into={"w": target})
    assert not target.any()


def sharing(memory: torch.Tensor) -> dict[str, dict[str, Any]]:
    """States of several leaves each in the same memory, 24 floats."""
    table, fields = memory.reshape(4, 6), memory.view(torch.complex64)
    return {
        "tied": {"emb": memory, "head": torch.nn.Parameter(memory)},
        "turned": {"emb": table, "head": table.t()},
        "flat": {"all": memory, "low": memory[:10], "high": memory[10:], "odd": table[:, 1::2]},
        "columns": {"left": table[:, :2], "right": table[:, 2:], "none": memory[:0]},
        "array": {"t": memory, "n": memory.numpy()[::-1], "z": memory.numpy()[5:9]},
        "lazy": {"f": fields, "c": fields.conj(), "i": fields.conj().imag[2:5]},
        "shards": {"a": Shard(memory[:6], (6,), (0,)), "b": Shard(memory[3:9], (6,), (0,))},
    }


@pytest.mark.parametrize("kind", list(sharing(torch.zeros(24))))
def test_targets_that_share_memory_are_filled_where_the_saved_agree(
    tmp_path: Any, differences: Differences, kind: str
) -> None:
    manager, values = CheckpointManager(tmp_path), torch.arange(24.0)
    manager.save(1, sharing(values.clone())[kind]).wait()
    memory = torch.zeros(24)
    manager.load(into=sharing(memory)[kind])
    covered = 9 if kind == "shards" else 24
    assert torch.equal(memory[:covered], values[:covered])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tied", "emb and head"),
        ("turned", "emb and head"),
        ("flat", "low and all|all and low"),
        ("array", "n and t|t and n"),
        ("lazy", "f and c|c and f"),
        ("shards", "a and b"),
    ],
)
def test_targets_that_share_memory_are_refused_where_the_saved_differ(
    tmp_path: Any, kind: str, names: str
) -> None:
    saved: dict[str, Any] = {}
    for name, leaf in sharing(torch.arange(24.0))[kind].items():
        saved[name] = torch.arange(6.0) if isinstance(leaf, Shard) else copy.deepcopy(leaf)
    with torch.no_grad():
        next(iter(saved.values()))[0] = 77.0
    manager = CheckpointManager(tmp_path)
    manager.save(1, {**saved, "first": torch.ones(5)}).wait()
    memory, first = torch.zeros(24), torch.zeros(5)
    with pytest.raises(CheckpointError, match=f"cannot load ({names}): .*share memory.*differ"):
        manager.load(into={"first": first, **sharing(memory)[kind]})
    assert not memory.any()
    assert not first.any()
    assert manager.latest() == 1


def test_into_may_be_any_view(tmp_path: Any) -> None:
    whole, array = torch.zeros(4, 5, 6), np.zeros((4, 5, 6))
    views: list[Any] = [
        *(whole.permute(2, 0, 1), whole[1:, ::2, 3], whole.diagonal(0, 1, 2), whole[:0]),
        *(whole.diagonal(1, 0, 2), whole[:1].expand(1, 5, 6), whole[2:3, :, 1], whole[0, 0, 0]),
        *(array[::-1, :, ::2], array.T, array[:, None, 0], array[..., ::-1].transpose(1, 0, 2)),
    ]
    manager = CheckpointManager(tmp_path)
    for step, view in enumerate(views):
        saved = (
            np.random.rand(*view.shape) if isinstance(view, np.ndarray) else torch.rand_like(view)
        )
        manager.save(step, [saved]).wait()
        manager.load(into=[view])
        assert (view == saved).all()


def test_containers_may_repeat_and_lie_200_deep(tmp_path: Any) -> None:
    shared = [1, {"x": ()}]
    state = {"a": shared, "b": [shared, shared], "deep": nested(199)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, state).wait()
    assert manager.load() == state


def test_nothing_to_load(tmp_path: Any) -> None:
    manager = CheckpointManager(tmp_path / "new" / "deep")
    assert manager.latest() is None
    assert manager.steps() == []
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        manager.load()
    manager.save(3, {"a": 1}).wait()
    with pytest.raises(CheckpointError, match="no good checkpoint of step 4"):
        manager.load(4)
