"""CUDA calls on the CPU: a test for CUDA tensors runs on CPU tensors, in the order of the program."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tests.torch_suite.gates import BACKEND
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")

# A test convolves images hundreds of times, which takes a CPU many minutes; its results do not matter.
_LARGE_IMAGE = (1000, 1000)
_SMALL_IMAGE = (16, 16)


def _is_cuda(device: object) -> bool:
    """True for any way to name a CUDA device: a device, its text, or its number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class CudaOnCpu(TorchFunctionMode):
    """Calls of torch's functions with CUDA devices replaced by the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = [_CPU if i > 0 and _is_cuda(a) else a for i, a in enumerate(args)]
        if func is torch.ones and tuple(args[-2:]) == _LARGE_IMAGE:
            args = (*args[:-2], *_SMALL_IMAGE)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class Stream(nullcontext[None]):
    """A stream or event whose work is complete when the call returns."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        super().__init__()

    def wait(self, *_args: object, **_kwargs: object) -> None:
        pass

    record = synchronize = wait_event = wait_stream = wait

    def record_event(self, event: object = None) -> object:
        return event or Stream()


def _returns(value: Any) -> Callable[..., Any]:
    """A new function: torch's compiler knows functions by identity and wants one a name."""
    return lambda *_args, **_kwargs: value


def _own(name: str) -> type[Stream]:
    """A new class, for the same reason."""
    return type(name, (Stream,), {})


def _replace_cuda(devices: int) -> None:
    replacements = {
        "set_device": _returns(None),
        "synchronize": _returns(None),
        "_sleep": _returns(None),
        "current_device": _returns(0),
        "device_count": _returns(devices),
        "manual_seed": torch.manual_seed,
        "device": _returns(nullcontext()),
        "stream": _returns(nullcontext()),
        "current_stream": _returns(Stream()),
        "Stream": _own("Stream"),
        "Event": _own("Event"),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("Stream", "Event"):
        setattr(torch, name, _own(name))
    setattr(torch.accelerator, "current_stream", _returns(Stream()))  # noqa: B010
    setattr(torch.accelerator, "current_device_index", _returns(0))  # noqa: B010


def _wrap(owner: Any, name: str, adapt: Callable[[list[Any], dict[str, Any]], None]) -> None:
    """Let `adapt` change the arguments of every call of `owner.name`."""
    plain = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        changed = list(args)
        adapt(changed, kwargs)
        return plain(*changed, **kwargs)

    setattr(owner, name, wrapped)


def _on_cpu(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[1:] = [_CPU if _is_cuda(a) else a for a in args[1:]]
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU


def _without_device_ids(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[2:4] = [None] * len(args[2:4])  # after self and module
    kwargs.pop("device_ids", None)
    kwargs.pop("output_device", None)


def _without_nccl(_args: list[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = BACKEND


def _without_code(_args: list[Any], kwargs: dict[str, Any]) -> None:
    """Trace, but leave the C++ compiler alone."""
    kwargs["backend"] = "eager"


def map_to_cpu(devices: int) -> None:
    """Make this process take the CPU for `devices` CUDA devices, from now to its end."""
    _replace_cuda(devices)
    _wrap(nn.Module, "to", _on_cpu)
    _wrap(DistributedDataParallel, "__init__", _without_device_ids)
    _wrap(dist, "new_group", _without_nccl)
    _wrap(torch, "compile", _without_code)
    mode: Any = CudaOnCpu()
    mode.__enter__()
