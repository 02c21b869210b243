"""Deprecated public names: each use warns and returns the object of the new name."""

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any


def module(old: str, new: str) -> None:
    """Makes `import old` return the module `new`; the module `old` calls this at its import."""
    _warn(old, new, 4)
    sys.modules[old] = importlib.import_module(new)


def attribute(owner: str, name: str, renamed: Mapping[str, str]) -> Any:
    """Returns the attribute that replaces `name` in module `owner`; for the module's `__getattr__`.

    Raises:
        AttributeError: `name` is not a deprecated name of the module.
    """
    if name not in renamed:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    _warn(f"{owner}.{name}", f"{owner}.{renamed[name]}", 4)
    return getattr(sys.modules[owner], renamed[name])


def argument(given: Mapping[str, Any], old: str, new: str, value: Any) -> Any:
    """Returns the value of the deprecated argument `old` if the caller gave it, else `value`.

    `value` is the value of the argument `new`.
    """
    if old not in given:
        return value
    _warn(f"{old}=", f"{new}=", 4)
    return given[old]


def _warn(old: str, new: str, level: int) -> None:
    text = f"{old} is now {new}; the next release removes the old name"
    warnings.warn(text, DeprecationWarning, stacklevel=level)
