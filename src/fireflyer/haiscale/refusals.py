"""What no wrapper can train rightly: refused at wrapping, by name."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from fireflyer.errors import ConfigError
from fireflyer.haiscale.facts import refuse_wrapped

_ROWS = (nn.Embedding, nn.EmbeddingBag)


def check_module(module: nn.Module, wrapper: str) -> None:
    """
    Args:
        wrapper: its name, for the error.

    Raises:
        ConfigError: no module, or one that is already wrapped or sharded, makes sparse gradients, or writes
            parameters in its forward.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{wrapper} takes a torch.nn.Module, not {given(module)}")
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
                f"{name or 'the module'} has max_norm={part.max_norm}: it writes its weight in forward, on "
                "each rank other rows; renormalise all rows after optimizer.step() instead"
            )


def _sharded(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names, and what shows it."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    yield from ((name, type(t).__name__) for name, t in tensors if isinstance(t, DTensor))
    for (
        name,
        part,
    ) in module.named_modules():  # what is gathered at the moment shows plain parameters
        if hasattr(part, "_get_fsdp_state"):
            yield name or "the module", "fully_shard"


def check_count(name: str, value: object, least: int) -> None:
    """Raises ConfigError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={_short(value)}: an integer from {least} on is taken")


def given(value: object) -> str:
    """An argument, for an error."""
    return "None" if value is None else f"{_short(value)} ({type(value).__name__})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
