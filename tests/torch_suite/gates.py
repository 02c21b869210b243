"""Import of torch's tests for backend hfreduce, without the gates that keep other backends out.

torch decides while its modules are imported which backends run a test. So the decorators are replaced
before the import, in the process that forks the ranks. Gates about anything but the backend and CUDA stay.
"""

import importlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

BACKEND = "hfreduce"
WORLD_SIZE = 3

# Reasons of torch's for a skip that no backend can do anything about.
_KEPT_GATES = (
    "Skipped due to flakiness",
    "Currently failing in NVIDIA internal CI",
    "Test requires world size of",
    "Test requires an exact world size of",
    "no torchvision",
)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _lifted(*_args: object, **_kwargs: object) -> Decorator:
    """Stands for a factory of decorators that skip."""
    return _unchanged


def _skip(reason: str) -> Decorator:
    """Skip for torch's reason, unless the reason is the backend."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if reason.startswith(_KEPT_GATES):
            function.__unittest_skip__ = True  # type: ignore[attr-defined]
            function.__unittest_skip_why__ = reason  # type: ignore[attr-defined]
        return function

    return decorate


def _skip_if(condition: object, reason: str) -> Decorator:
    return _skip(reason) if condition else _unchanged


def set_environment() -> None:
    """Set what torch's launcher passes to the tests in the environment."""
    os.environ.update(
        BACKEND=BACKEND,
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD="file://",  # a test's own file replaces it
        OMP_NUM_THREADS="1",
        PYTORCH_TEST_WITH_SLOW="0",
    )


@contextmanager
def _replaced(module: ModuleType, **replacements: object) -> Iterator[None]:
    real = {name: getattr(module, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for name, value in real.items():
            setattr(module, name, value)


def _provide_expecttest() -> None:
    """Stand in for the package `expecttest`, of which torch's tests need the base class alone."""
    if importlib.util.find_spec("expecttest") is None:
        stub: Any = ModuleType("expecttest")
        stub.TestCase, stub.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stub


def load_tests() -> Any:
    """Import `distributed_test` with the gates lifted.

    Returns:
        The module of torch.
    """
    set_environment()
    _provide_expecttest()
    utils = importlib.import_module("torch.testing._internal.common_utils")
    with _replaced(
        utils, skip_but_pass_in_sandcastle=_skip, skip_but_pass_in_sandcastle_if=_skip_if
    ):
        common: Any = importlib.import_module("torch.testing._internal.common_distributed")
        for feature in common.DistTestCases.backend_feature.values():
            feature.add(BACKEND)
        with _replaced(
            common,
            nccl_skip_if_lt_x_gpu=_lifted,
            require_n_gpus_for_nccl_backend=_lifted,
            requires_nccl_version=_lifted,
            skip_if_lt_x_gpu=_lifted,
            skip_if_no_gpu=_unchanged,
            skip_if_small_worldsize=_unchanged,
        ):
            return importlib.import_module("torch.testing._internal.distributed.distributed_test")
