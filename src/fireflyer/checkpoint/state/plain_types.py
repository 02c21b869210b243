"""Conversion of other libraries' states to the types that a checkpoint can hold."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch


def plain(value: Any) -> Any:
    """Converts all items of `value` to plain types.

    Subclasses of dict, list, tuple, str, int and float (a Counter, a torch.Size, an enum of
    strings) become these types, numpy's scalars become Python's, and paths become text. All other
    items stay, and `save` rejects them by name.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes) or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    for base in (str, int, float):
        if isinstance(value, base):
            return base.__str__(value) if base is str else base(value)
    return value


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are single numbers, as floats; drops all other metrics."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, np.generic) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found
