"""Whole numbers among arguments: what is none is refused where it came in, not where it would matter."""

import operator
from typing import Any

import numpy as np


def whole(what: str, value: Any) -> int:
    """`value` as an int; `what` names it in an error.

    Raises:
        TypeError: it is a bool or no integer.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what} must be a whole number, not {value!r:.100}")
