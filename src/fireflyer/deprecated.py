"""Deprecated public names: each use warns and gives what the new name stands for."""

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any


def module(old: str, new: str) -> None:
    """Make `import old` give the module `new`. To be called by the module `old` when it is imported."""
    _warn(old, new, 4)
    sys.modules[old] = importlib.import_module(new)


def attribute(owner: str, name: str, renamed: Mapping[str, str]) -> Any:
    """The attribute that `name` of module `owner` is called now. For the module's `__getattr__`.

    Raises:
        AttributeError: `name` was never there.
    """
    if name not in renamed:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    _warn(f"{owner}.{name}", f"{owner}.{renamed[name]}", 4)
    return getattr(sys.modules[owner], renamed[name])


def argument(given: Mapping[str, Any], old: str, new: str, value: Any) -> Any:
    """Returns the argument `old` if it is given, else `value`, which `new` has."""
    if old not in given:
        return value
    _warn(f"{old}=", f"{new}=", 4)
    return given[old]


def _warn(old: str, new: str, level: int) -> None:
    text = f"{old} is now {new}; the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=level)
