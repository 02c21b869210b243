"""Rejection of copies for modules that take part in collective work on their group."""

from typing import Any, NoReturn, Self, TypeVar

from torch import nn

from fireflyer.errors import ConfigError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Uncopied(nn.Module):
    """Base of modules for which `copy.deepcopy`, pickle and `torch.save` raise a ConfigError.

    `copy.copy` makes another module object with the same parameters and groups.
    """

    def __copy__(self) -> Self:
        return second_name(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy(self)

    def __getstate__(self) -> NoReturn:
        refuse_copy(self)


def second_name(module: AnyModule) -> AnyModule:
    """Returns another object with the attributes of `module`."""
    made = module.__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


def refuse_copy(module: nn.Module) -> NoReturn:
    """Raises the ConfigError of a module that cannot be copied or pickled."""
    raise ConfigError(
        f"a {type(module).__name__} cannot be copied or pickled, because its ranks work together: "
        "make a new one, and load state_dict() into it"
    )
