"""Boxes and plans, against brute force: every element is written once, and lies where it is said to."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.checkpoint import Shard
from fireflyer.checkpoint.save import plan
from fireflyer.checkpoint.save.plan import make_plan
from fireflyer.checkpoint.state.boxes import (
    Box,
    Shape,
    boxes_of_range,
    flaw,
    intersection,
    is_contiguous,
    position,
    split_rows,
    whole,
)
from fireflyer.checkpoint.state.layout import Layout, Taker
from fireflyer.errors import CheckpointError

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: Callable[..., Any], shape: Shape) -> Box:
    offsets = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    extents = tuple(
        draw(st.integers(1, extent - offset)) for extent, offset in zip(shape, offsets, strict=True)
    )
    return Box(offsets, extents)


def divided(shape: Shape, cuts: random.Random) -> list[Box]:
    """The tensor cut in two again and again."""
    boxes = [whole(shape)]
    for _ in range(cuts.randrange(6)):
        box = boxes.pop(cuts.randrange(len(boxes)))
        dims = [d for d, extent in enumerate(box.shape) if extent > 1]
        if not dims:
            boxes.append(box)
            continue
        cut = cuts.choice(dims)
        at = cuts.randrange(1, box.shape[cut])
        low, high = list(box.shape), list(box.shape)
        low[cut], high[cut] = at, box.shape[cut] - at
        moved = list(box.offsets)
        moved[cut] += at
        boxes += [Box(box.offsets, tuple(low)), Box(tuple(moved), tuple(high))]
    return boxes


def numbered(shape: Shape) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape)).reshape(shape)


@given(shapes, st.data())
def test_places_of_a_box(shape: Shape, data: st.DataObject) -> None:
    outer, inner = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    all_of_it = numbered(shape)
    both = intersection(outer, inner)
    wanted = set(all_of_it[outer.slices].flat) & set(all_of_it[inner.slices].flat)
    assert wanted == (set(all_of_it[both.slices].flat) if both else set())
    if both is None:
        return
    flat = numbered(outer.shape)[both.within(outer).slices].reshape(-1)
    assert position(both, outer) == flat[0]
    assert is_contiguous(both, outer) == (flat[-1] - flat[0] + 1 == len(flat))


@given(shapes, st.data())
def test_a_range_in_boxes(shape: Shape, data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    found: list[int] = []
    for place, box in boxes_of_range(shape, start, stop):
        assert place == start + len(found)
        assert is_contiguous(box, whole(shape))
        found.extend(numbered(shape)[box.slices].flat)
    assert found == list(range(start, stop))


@given(shapes, st.randoms(use_true_random=False))
def test_divisions_are_known_and_their_flaws(shape: Shape, cuts: random.Random) -> None:
    boxes = divided(shape, cuts)
    assert flaw(shape, boxes) is None
    assert "in no part" in (flaw(shape, boxes[1:]) or "")
    assert "overlap" in (flaw(shape, [*boxes, boxes[0]]) or "")
    beyond = Box(tuple(offset + 1 for offset in whole(shape).offsets), shape)
    if shape:
        assert "is not inside" in (flaw(shape, [beyond]) or "")


@given(shapes, st.integers(1, 6))
def test_rows_divide_a_box(shape: Shape, parts: int) -> None:
    rows = split_rows(whole(shape), parts)
    assert len(rows) <= parts
    assert flaw(shape, rows) is None
    assert all(is_contiguous(row, whole(shape)) for row in rows)
    assert [position(row, whole(shape)) for row in rows] == sorted(
        position(row, whole(shape)) for row in rows
    )


def layout_of(state: Any) -> Layout:
    return Taker().take(state).layout


@given(
    st.lists(shapes, max_size=4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_element_is_written_once(
    tensors: list[Shape], world: int, choice: random.Random, large: bool
) -> None:
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for index, shape in enumerate(tensors):
        for box in divided(shape, choice):
            shard = Shard(torch.empty(box.shape), shape, box.offsets)
            holders = choice.sample(range(world), choice.randrange(1, world + 1))
            for rank in holders:
                # A rank holds one box of a tensor.
                states[rank].setdefault(f"t{index}", shard)
    layouts = [layout_of(state) for state in states]
    held = {(slot.path, slot.box) for layout in layouts for slot in layout.tensors if slot.box}
    complete = all(
        flaw(shape, [box for path, box in held if path == (f"t{index}",)]) is None
        for index, shape in enumerate(tensors)
        if any(path == (f"t{index}",) for path, _ in held)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SPLIT_BYTES", 8 if large else 1 << 20)
        if not complete:
            with pytest.raises(CheckpointError, match="cannot save t"):
                make_plan(layouts)
            return
        found = make_plan(layouts)
        assert make_plan([Layout.decode(one.encoded) for one in layouts]).shares == found.shares
    for index, slot in enumerate(found.tensors):
        mine = [share for own in found.shares for share in own if share.tensor == index]
        assert flaw(slot.shape, [share.box for share in mine]) is None
    for rank, own in enumerate(found.shares):
        for share in own:
            holder = layouts[rank].tensors[share.leaf]
            assert holder.box is not None
            assert holder.path == found.tensors[share.tensor].path
            assert is_contiguous(share.box, holder.box)
            assert share.start == position(share.box, holder.box) * 4
            assert share.nbytes == share.box.elements * 4


def test_replicas_are_balanced_and_small_states_stay_together() -> None:
    big = {f"w{index}": torch.empty(size << 18) for index, size in enumerate([40, 9, 7, 5, 3, 30])}
    found = make_plan([layout_of(big)] * 4)
    loads = [sum(share.nbytes for share in own) for own in found.shares]
    assert sum(loads) == 94 << 20
    assert max(loads) <= 1.2 * 94 / 4 * (1 << 20)
    small = make_plan([layout_of({f"w{i}": torch.empty(10) for i in range(100)})] * 4)
    assert [len(own) for own in small.shares] == [100, 0, 0, 0]


def test_states_are_merged_in_order() -> None:
    first = {"a": {"x": 1, "y": torch.ones(2)}, "l": [1], "only0": None}
    second = {"b": 2, "a": {"z": torch.ones(3), "x": 5}, "l": [1, [2]]}
    found = make_plan([layout_of(first), layout_of(second)])
    assert [slot.path for slot in found.nodes] == [
        (),
        ("a",),
        ("a", "x"),
        ("a", "y"),
        ("a", "z"),
        ("l",),
        ("l", 0),
        ("l", 1),
        ("l", 1, 0),
        ("only0",),
        ("b",),
    ]
    assert found.values == [[0, 1, 2], [0, 3]]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1}, {"a": [1]}, "a: it is a plain value on rank 0, a list on rank 1"),
        ({"a": {"b": 1}}, {"a": (1,)}, "a: it is a dict on rank 0, a tuple on rank 1"),
        (
            {"w": torch.ones(2)},
            {"w": torch.ones(3)},
            r"w: .*shape \[2\] on rank 0, .*\[3\] on rank 1",
        ),
        ({"w": torch.ones(2)}, {"w": torch.ones(2).int()}, "w: .*float32.*int32"),
        ({"w": torch.ones(2)}, {"w": np.ones(2, np.float32)}, "w: .*torch.*numpy"),
        (
            {"w": Shard(torch.ones(2), (4,), (0,))},
            {"w": Shard(torch.ones(2), (4,), (1,))},
            r"w: \[0:2\] and \[1:3\] overlap",
        ),
        (
            {"w": Shard(torch.ones(2), (5,), (0,))},
            {"w": Shard(torch.ones(2), (5,), (3,))},
            r"w: 1 elements of shape \[5\] are in no part",
        ),
        ({"w": Shard(torch.ones(0), (5,), (0,))}, {}, r"w: 5 elements of shape \[5\]"),
    ],
)
def test_contradictions_are_named(first: Any, second: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot save {message}"):
        make_plan([layout_of(first), layout_of(second)])


def test_the_quick_way_takes_the_same_apart() -> None:
    def state(value: Any, extra: Any) -> dict[Any, Any]:
        return {"w": torch.ones(2, 3), "n": np.ones(4), "v": [value, (value, {"k": 1})], 5: extra}

    taker = Taker()
    first = taker.take(state(1, Shard(torch.ones(2), (4,), (0,))))
    again = taker.take(state(None, Shard(torch.zeros(2), (4,), (0,))))
    assert again.layout is first.layout
    assert again.values == [None, None, 1]
    assert [leaf.local.tolist() for leaf in again.leaves if isinstance(leaf, Shard)] == [[0.0, 0.0]]
    others: list[Any] = [
        Shard(torch.ones(2), (4,), (1,)),
        Shard(torch.ones(2), (5,), (0,)),
        Shard(torch.ones(2, dtype=torch.int32), (4,), (0,)),
        torch.ones(2),
        np.ones(2),
        7,
        [],
    ]
    for other in others:
        changed = taker.take(state(1, other))
        assert changed.layout.digest != first.layout.digest
        assert changed.layout.digest == layout_of(state(1, other)).digest
    for other in ([1, True], {"a": 1}, {1: 2}, torch.ones(1), 3):
        assert taker.take(other).layout.digest == layout_of(other).digest
    taker.take({1: 2})
    with pytest.raises(CheckpointError, match="cannot save the key True"):
        taker.take({True: 2})
