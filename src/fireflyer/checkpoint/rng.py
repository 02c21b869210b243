"""States of a process's random number generators, in a form that can be saved."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Returns the states of the random number generators.

    These are the global generators of Python, numpy and torch, and the current CUDA device's
    generator if CUDA is in use.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, np.array(words, dtype=np.uint32), gauss],
        "numpy": [str(kind), np.array(keys), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def as_tuples(state: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns Python's and numpy's generator states in the form that their setters accept."""
    version, words, gauss = state["python"]
    return (version, tuple(words.tolist()), gauss), tuple(state["numpy"])


def restore(state: Mapping[str, Any]) -> None:
    """Restores the generators; the inverse of `capture`."""
    python, legacy = as_tuples(state)
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
