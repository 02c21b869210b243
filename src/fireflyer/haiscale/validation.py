"""Validation of modules and arguments: wrappers reject modules that they cannot train."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from fireflyer.errors import ConfigError
from fireflyer.haiscale.reporting.facts import refuse_wrapped

_ROWS = (nn.Embedding, nn.EmbeddingBag)


def check_module(module: nn.Module, wrapper: str) -> None:
    """Checks that a wrapper can train a module.

    Args:
        wrapper: name of the wrapper, for the error.

    Raises:
        ConfigError: `module` is not a module, is already wrapped or sharded, makes sparse
            gradients, or writes parameters in its forward.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"invalid module {given(module)} for {wrapper}: expected a torch.nn.Module"
        )
    refuse_wrapped(module)
    for name, kind in _sharded(module):
        raise ConfigError(
            f"{wrapper}: {name} is already sharded ({kind}): wrap a module with plain parameters, once"
        )
    for name, part in module.named_modules():
        if not isinstance(part, _ROWS):
            continue
        if part.sparse:
            raise ConfigError(f"{name or 'the module'} makes sparse gradients: use sparse=False")
        if part.max_norm is not None:
            raise ConfigError(
                f"{name or 'the module'} has max_norm={part.max_norm}: forward would change other rows of "
                "its weight on each rank; renormalise all rows after optimizer.step() instead"
            )


def _sharded(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the name of each sharded part, and its kind: the tensor's type, or "fully_shard"."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    yield from ((name, type(t).__name__) for name, t in tensors if isinstance(t, DTensor))
    # While the parameters of a sharded module are gathered, they are not DTensors.
    for name, part in module.named_modules():
        if hasattr(part, "_get_fsdp_state"):
            yield name or "the module", "fully_shard"


def check_count(name: str, value: object, least: int) -> None:
    """Raises ConfigError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ConfigError(
            f"invalid {name} {_short(value)}: expected an integer of at least {least}"
        )


def check_max_norm(value: object) -> None:
    """Raises ConfigError unless gradients can be clipped to the norm `value`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"invalid max_norm {given(value)}: expected a number of at least 0")


def given(value: object) -> str:
    """Formats an argument for an error message."""
    return "None" if value is None else f"{_short(value)} ({type(value).__name__})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
