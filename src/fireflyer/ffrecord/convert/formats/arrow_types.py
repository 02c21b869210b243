"""Translation of Arrow's types to types and shapes of columns."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fireflyer.ffrecord.convert.source import NESTED, Column

_STRINGS = ("string", "large_string", "string_view")
_BINARIES = ("binary", "large_binary", "fixed_size_binary", "binary_view")
_LISTS = ("list", "large_list", "fixed_size_list")
_INT32, _INT64 = ("date32", "time32"), ("timestamp", "date64", "time64", "duration")
_TENSOR = "arrow.fixed_shape_tensor"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Fixed-shape tensor, which Arrow stores as a flat list.

    Attributes:
        shape: sizes in the order of the stored numbers.
        order: axes of `shape` in the order of the tensor's axes.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)

    def arranged(self, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Reshapes an array from (..., product of `shape`) to (..., *sizes)."""
        around = flat.shape[:-1]
        whole = flat.reshape(*around, *self.shape)
        return whole.transpose(*range(len(around)), *(len(around) + axis for axis in self.order))


class ArrowTypes:
    """Translation of types with `arrow`, the pyarrow that is installed."""

    def __init__(self, arrow: Any) -> None:
        self._arrow = arrow

    def is_(self, kind: Any, *names: str) -> bool:
        """Returns whether `kind` is one of these types, as far as this pyarrow knows them."""
        tests = (getattr(self._arrow.types, f"is_{name}", None) for name in names)
        return any(test(kind) for test in tests if test is not None)

    def is_list(self, kind: Any) -> bool:
        return self.is_(kind, *_LISTS)

    def storage(self, kind: Any) -> Any:
        return kind.storage_type if isinstance(kind, self._arrow.BaseExtensionType) else kind

    def plain(self, kind: Any) -> Any:
        """Returns the type without extensions, with dates, times and durations as integers.

        Arrow converts values to this type without loss.
        """
        arrow, kind = self._arrow, self.storage(kind)
        if self.is_(kind, *_INT32):
            return arrow.int32()
        if self.is_(kind, *_INT64):
            return arrow.int64()
        if self.is_(kind, "fixed_size_list"):
            return arrow.list_(self.plain(kind.value_type), kind.list_size)
        if self.is_(kind, "list", "large_list"):
            make = arrow.large_list if self.is_(kind, "large_list") else arrow.list_
            return make(self.plain(kind.value_type))
        if self.is_(kind, "struct"):
            fields = (kind.field(number) for number in range(len(kind)))
            return arrow.struct([(field.name, self.plain(field.type)) for field in fields])
        if self.is_(kind, "map"):
            return arrow.map_(self.plain(kind.key_type), self.plain(kind.item_type))
        return kind

    def column(self, name: str, kind: Any) -> tuple[Column, Tensor | None] | None:
        """Returns a pair: the column for values of a type, and the tensor in these values or None.

        Returns None instead of a pair if a record file cannot store the type.
        """
        shape, inner, tensor = self._axes(kind)
        if not shape and self.is_(inner, *_STRINGS):
            return Column(name, "str"), None
        if not shape and self.is_(inner, *_BINARIES):
            return Column(name, "bytes"), None
        if self._is_number(inner):
            return Column(name, np.dtype(inner.to_pandas_dtype()).name, shape), tensor
        if self._is_nestable(self.plain(kind)):
            return Column(name, NESTED), tensor
        return None

    def _axes(self, kind: Any) -> tuple[tuple[int | None, ...], Any, Tensor | None]:
        """Returns the shape of lists and tensors, the type of their elements, and the tensor or None."""
        shape: tuple[int | None, ...] = ()
        inner = kind.value_type if self.is_(kind, "dictionary") else kind
        while True:
            if getattr(inner, "extension_name", "") == _TENSOR:
                order = inner.permutation or range(len(inner.shape))
                tensor = Tensor(tuple(inner.shape), tuple(order))
                return shape + tensor.sizes, self.plain(inner.value_type), tensor
            inner = self.storage(inner)
            if not self.is_list(inner):
                return shape, self.plain(inner), None
            shape += (inner.list_size if self.is_(inner, "fixed_size_list") else None,)
            inner = inner.value_type

    def _is_number(self, kind: Any) -> bool:
        return self.is_(kind, "integer", "floating", "boolean")

    def _is_nestable(self, kind: Any) -> bool:
        """Returns whether nested values can hold this plain type."""
        if self.is_list(kind) or self.is_(kind, "dictionary"):
            return self._is_nestable(kind.value_type)
        if self.is_(kind, "struct"):
            return all(self._is_nestable(kind.field(number).type) for number in range(len(kind)))
        if self.is_(kind, "map"):
            return self._is_nestable(kind.key_type) and self._is_nestable(kind.item_type)
        return self._is_number(kind) or self.is_(kind, "null", *_STRINGS, *_BINARIES)
