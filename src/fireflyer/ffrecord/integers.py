"""Validation of integer arguments at the call that receives them."""

import operator
from typing import Any

import numpy as np


def checked_integer(what: str, value: Any) -> int:
    """Returns `value` as an int; `what` names the argument in an error.

    Raises:
        TypeError: the value is a bool or not an integer.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what} must be a whole number, not {value!r:.100}")
