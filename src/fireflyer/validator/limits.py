"""Fixed thresholds of a site: the smallest and the largest value that a figure may have."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fireflyer.errors import ValidatorError
from fireflyer.validator.model import Result


class Bound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allowed range of one figure, in the figure's unit."""

    min: float | None = None
    max: float | None = None


class Limits(msgspec.Struct, frozen=True):
    """Allowed ranges, keyed by the name of the figure."""

    bounds: dict[str, Bound]

    def applied(self, result: Result) -> Result:
        """Returns the result; marks it failed if it passed but its value is out of range."""
        bound = self.bounds.get(result.name)
        if bound is None or result.status != "passed" or result.value is None:
            return result
        reason = ""
        if bound.min is not None and result.value < bound.min:
            reason = f"{result.value:.6g} {result.unit} is below the limit {bound.min:g}"
        elif bound.max is not None and result.value > bound.max:
            reason = f"{result.value:.6g} {result.unit} is above the limit {bound.max:g}"
        return msgspec.structs.replace(result, status="failed", reason=reason) if reason else result


def read(path: Path, known: set[str]) -> Limits:
    """Reads limits. The file has a table for each figure: `["memory bandwidth"]`, `min = 100`.

    Args:
        known: names of figures.

    Raises:
        ValidatorError: the file cannot be read or names an unknown figure.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        bounds = msgspec.convert(found, dict[str, Bound])
    except OSError as error:
        raise ValidatorError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValidatorError(f"{path}: {error}") from None
    try:
        verify(bounds, known)
    except ValidatorError as error:
        raise ValidatorError(f"{path}: {error}") from None
    return Limits(bounds)


def verify(bounds: Mapping[str, Bound], known: set[str]) -> None:
    """Rejects limits of unknown figures, and limits that no value or every value satisfies.

    Raises:
        ValidatorError: the message names the figure.
    """
    for name, bound in bounds.items():
        if name not in known:
            raise ValidatorError(f"unknown figure {name!r}; `fireflyer validate --list` shows all")
        least, most = bound.min, bound.max
        if least is None and most is None:
            raise ValidatorError(f"the limit of {name!r} has neither min nor max")
        if not (-math.inf if least is None else least) <= (math.inf if most is None else most):
            raise ValidatorError(f"invalid limit of {name!r}: expected numbers, min not above max")
