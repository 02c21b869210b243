"""Recipes that compute a tensor again, so that no operator must keep the tensor for backward.

An operator attaches a recipe to its output. An operator that takes the output runs under `keep`: if
autograd saves any part of the output there, it saves the recipe instead, and backward computes the
part again. The formulas of backward remain torch's own, so gradients have the bits of eager
execution.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fireflyer.torch_internals.core import is_transformed, saved_tensor_hooks

R = TypeVar("R")
_ATTRIBUTE = "_fireflyer_recipe"


class Recipe:
    """Function of tensors and of other recipes that returns a tensor with the same bits each time.

    Autocast is off during the computation. `make` fails if a source was changed in place since the
    recipe was made.

    Args:
        compute: function of the values of `sources`; must not depend on global state.
        sources: recipes, and tensors that the recipe keeps.
        costly: True to keep the result until every operator that waits for it has taken it.
    """

    __slots__ = ("_made", "_versions", "_waiting", "compute", "costly", "sources")

    def __init__(
        self, compute: Callable[..., Tensor], *sources: "Tensor | Recipe", costly: bool = False
    ) -> None:
        self.compute = compute
        self.sources = tuple(s.detach() if isinstance(s, Tensor) else s for s in sources)
        self.costly = costly
        self._versions = tuple(_version_of(s) if isinstance(s, Tensor) else 0 for s in self.sources)
        self._waiting = 0
        self._made: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that the recipe keeps, including those of its sources."""
        for source in self.sources:
            if isinstance(source, Recipe):
                yield from source.tensors()
            else:
                yield source

    def expect(self) -> None:
        """Announces one call of `make`."""
        self._waiting += 1
        for source in self.sources:
            if isinstance(source, Recipe):
                source.expect()

    def make(self) -> Tensor:
        """Computes the tensor.

        Raises:
            RuntimeError: a source was modified by an in-place operation.
        """
        self._waiting -= 1
        made = self._made
        if made is None:
            made = self.compute(*map(self._value, self.sources, self._versions))
        self._made = made if self.costly and self._waiting > 0 else None
        return made

    @staticmethod
    def _value(source: "Tensor | Recipe", version: int) -> Tensor:
        if isinstance(source, Recipe):
            return source.make()
        if _version_of(source) != version:
            raise RuntimeError(
                f"backward computes from a tensor of shape {list(source.shape)} that was modified by"
                f" an in-place operation: version {source._version}, expected {version}"
            )
        return source


class SavedRecipe:
    """Stand-in for a saved tensor: the recipe of its memory, and its position in that memory."""

    __slots__ = ("device", "place", "recipe", "size", "stride")

    def __init__(self, attached: "Attached", saved: Tensor) -> None:
        self.recipe = attached.recipe
        self.size, self.stride = attached.size, attached.stride
        self.place = saved.size(), saved.stride(), saved.storage_offset()
        self.device = saved.device.type
        self.recipe.expect()

    def make(self) -> Tensor:
        """Computes the saved tensor; raises the errors of `Recipe.make`."""
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            made = self.recipe.make()
            if made.stride() != self.stride or made.storage_offset():
                like = torch.empty_strided(
                    self.size, self.stride, dtype=made.dtype, device=made.device
                )
                made = like.copy_(made)
            return made.as_strided(*self.place)


class Attached:
    """Recipe with the version and the layout of the tensor that it describes."""

    __slots__ = ("recipe", "size", "stride", "version")

    def __init__(self, recipe: Recipe, tensor: Tensor) -> None:
        self.recipe = recipe
        self.version = _version_of(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()


def attach(tensor: Tensor, recipe: Recipe) -> Tensor:
    """Attaches a recipe to a fresh output if backward may need it; returns `tensor`."""
    if is_transformed() or type(tensor) is not Tensor:
        return tensor
    if tensor.requires_grad and tensor.storage_offset() == 0:
        setattr(tensor, _ATTRIBUTE, Attached(recipe, tensor))
    return tensor


def recipe_of(tensor: Tensor) -> Recipe | None:
    """Returns the recipe of a whole tensor; None for views and for tensors that have changed
    since."""
    found: Attached | None = getattr(tensor, _ATTRIBUTE, None)
    return found.recipe if found is not None and found.version == _version_of(tensor) else None


def source(tensor: Tensor) -> Tensor | Recipe:
    """Returns the source that a recipe keeps for a tensor: the tensor's own recipe, or the
    tensor."""
    return recipe_of(tensor) or tensor


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no changes


_observers: list["observe"] = []
"""Stack of the entered contexts; only the innermost context is told of each kept tensor."""


class observe(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801
    """Context in which `note` sees each tensor that autograd or a recipe keeps for backward."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        def pack(tensor: Tensor) -> Tensor:
            note(tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)
        self.note, self.pack = note, pack

    def __enter__(self) -> None:
        super().__enter__()
        _observers.append(self)

    def __exit__(self, *args: object) -> None:
        _observers.pop()
        super().__exit__(*args)


def _hooked_by_others() -> bool:
    """Returns True inside activation checkpointing or offloading: their hooks must see saved
    tensors."""
    top = saved_tensor_hooks(False)
    return top is not None and not (_observers and top[0] is _observers[-1].pack)


def keep(operator: Callable[..., R], tensor: Tensor, *args: Any) -> R:
    """Returns `operator(tensor, *args)`; where autograd saves `tensor`, it saves the recipe
    instead."""
    if is_transformed():
        return operator(tensor, *args)
    found: Attached | None = getattr(tensor, _ATTRIBUTE, None)
    if found is None and tensor._is_view() and tensor._base is not None:
        found = getattr(tensor._base, _ATTRIBUTE, None)
    if found is None or found.version != _version_of(tensor) or _hooked_by_others():
        return operator(tensor, *args)
    attached, memory = found, tensor.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | SavedRecipe:
        if saved.untyped_storage()._cdata == memory and saved.dtype == tensor.dtype:
            kept = SavedRecipe(attached, saved)
            for part in kept.recipe.tensors() if _observers else ():
                _observers[-1].note(part)
            return kept
        if _observers:
            _observers[-1].note(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return operator(tensor, *args)


def _unpack(packed: Tensor | SavedRecipe) -> Tensor:
    return packed.make() if isinstance(packed, SavedRecipe) else packed
