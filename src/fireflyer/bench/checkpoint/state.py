"""States for the checkpoint benchmark: GPT-like parameters and Adam's two moments."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from fireflyer._native import crc32

State = dict[str, Any]

LAYERS = 8
TENSORS = 301
ONE = "model.rope"
"""Name of a tensor of ONE_BYTES; every state has exactly one."""
ONE_BYTES = 1 << 20
_COPIES = 3
_LAYER_SHARE = 0.75


def gpt_state(size: int) -> State:
    """Returns nearly `size` bytes of random values in TENSORS float32 tensors. Equal sizes give equal
    values.

    The tree is {"model": {name: tensor}, "exp_avg": the same, "exp_avg_sq": the same, "step": int}.
    The tree also holds the tensor ONE. Three quarters of the other bytes are in LAYERS layers, the
    rest in the embedding.
    """
    generator = torch.Generator().manual_seed(7)
    shapes = _shapes(max(0, size - ONE_BYTES) // (_COPIES * 4))
    state: State = {
        part: {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        for part in ("model", "exp_avg", "exp_avg_sq")
    }
    state["model"]["rope"] = torch.rand(ONE_BYTES // 4 // 512, 512, generator=generator)
    state["step"] = 7
    return state


def _shapes(count: int) -> dict[str, tuple[int, ...]]:
    """Returns shapes with about `count` elements in total."""
    width = max(8, math.isqrt(int(count * _LAYER_SHARE) // (12 * LAYERS)) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {"wpe": (16, width)}
    shapes |= {f"ln_f.{kind}": (width,) for kind in ("weight", "bias")}
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{name}.bias"] = (rows,)
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            shapes[f"h.{layer}.{name}"] = (width,)
    left = count - sum(math.prod(shape) for shape in shapes.values())
    shapes["wte"] = (max(1, left // width), width)
    return shapes


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of nested dicts, in order, with dotted names."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from flat(child, f"{name}.{key}" if name else str(key))


def bytes_of(tree: Any) -> int:
    return sum(tensor.nbytes for _, tensor in flat(tree))


def checksums(tree: Any) -> list[int]:
    """Returns the CRC32 of each tensor, sorted by name."""
    return [
        crc32(tensor.numpy().data) for _, tensor in sorted(flat(tree), key=lambda item: item[0])
    ]


def erase(tree: Any) -> None:
    """Sets every tensor to zero, so that a load that fills nothing is detected."""
    for _, tensor in flat(tree):
        tensor.zero_()
