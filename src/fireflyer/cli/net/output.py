"""Printing and pages of the verbs of `fireflyer net`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fireflyer.cli.printing import show_result
from fireflyer.errors import ConfigError
from fireflyer.program import plain


def show(result: Mapping[str, Any], *, json: bool) -> None:
    """Prints figures as lines, and notes below them."""
    show_result(result, lambda: _show_text(result), json=json)


def _show_text(result: Mapping[str, Any]) -> None:
    for name, value in result.items():
        if name in ("notes", "loops") or value is None:
            continue
        text = f"{value:,.10g}" if isinstance(value, int | float) else str(value)
        sys.stdout.write(f"{name:<20} {plain(text)}\n")
    for note in result.get("notes", ()):
        sys.stdout.write(f"note: {plain(note)}\n")
    for loop in result.get("loops", ()):
        sys.stdout.write(f"credit loop on {plain(loop)}\n")


def write_page(path: Path, text: str) -> None:
    """Writes a page of drawings.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
