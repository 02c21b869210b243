"""Finds the loaded callback and logger classes of two Trainers: Lightning's and transformers'.

A Trainer calls every callback at every event. The methods of the base classes do nothing, so only
methods that a subclass overrides get a hook.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple


class Base(NamedTuple):
    """Base class of callbacks. The names of the methods that a Trainer calls begin with one of
    `prefixes`."""

    module: str
    name: str
    prefixes: tuple[str, ...]


BASES = (
    *(
        Base(f"{package}.{module}", name, prefixes)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, name, prefixes in (
            ("callbacks.callback", "Callback", ("on_",)),
            ("core.module", "LightningModule", ("on_",)),
            ("loggers.logger", "Logger", ("log_", "save")),
        )
    ),
    Base("transformers.trainer_callback", "TrainerCallback", ("on_",)),
    Base("accelerate.tracking", "GeneralTracker", ("log", "store_")),
)

_DISPATCHERS = ("CallbackHandler",)
"""Subclasses that only call other callbacks; they get no hooks."""


def callback_methods() -> Iterator[tuple[Any, str]]:
    """Yields class and name of each method that a subclass of a base class defines."""
    for base in BASES:
        root = getattr(sys.modules.get(base.module), base.name, None)
        if not isinstance(root, type):
            continue
        for owner in _subclasses(root):
            if owner.__name__ in _DISPATCHERS:
                continue
            for name, value in list(vars(owner).items()):
                if name.startswith(base.prefixes) and inspect.isfunction(value):
                    yield owner, name


def _subclasses(root: type) -> list[type]:
    """Returns all subclasses, each once."""
    found: dict[type, None] = {}
    waiting: list[type] = [root]
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        new = [owner for owner in below if owner not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return list(found)
