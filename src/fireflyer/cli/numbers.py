"""Check that numbers on a command line are written in ASCII digits.

The same rule holds for numbers in files, and for numbers in sizes and times.
Typer accepts everything that Python's `int` and `float` accept, for example `1_000` and ` 5`. A
wrongly copied number could then change its value unnoticed.
"""

from collections.abc import Iterable
from typing import Any

import typer


def strict(command: Any) -> None:
    """Makes all options and arguments of the command and its subcommands reject other spellings of
    numbers."""
    for parameter in command.params:
        parameter.process_value = _checked(parameter)
    for inner in getattr(command, "commands", {}).values():
        strict(inner)


def _checked(parameter: Any) -> Any:
    plain = parameter.process_value

    def process_value(context: Any, value: Any) -> Any:
        result = plain(context, value)
        for text, number in zip(_each(value), _each(result), strict=False):
            if isinstance(text, str) and isinstance(number, int | float) and not is_plain(text):
                raise typer.BadParameter(
                    f"expected a number in digits, instead of {text[:40]!a}",
                    ctx=context,
                    param=parameter,
                )
        return result

    return process_value


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def is_plain(text: str) -> bool:
    """Returns True if a number is written in ASCII, without blanks and underscores."""
    return text.isascii() and "_" not in text and text == text.strip()
