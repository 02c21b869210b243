"""Catalogue of parts and clusters. Each value has its source, or is "unknown"."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fireflyer.errors import FabricError

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Value:
    """Figure with its source; `amount` is None if no source states the figure."""

    amount: float | None
    source: str


class Catalogue:
    """Sections of a catalogue, e.g. `node.pcie-a100`."""

    def __init__(self, sections: dict[str, Any], origin: str) -> None:
        self._sections, self._origin = sections, origin

    @classmethod
    def read(cls, path: Path | None = None) -> "Catalogue":
        """Reads a TOML file; default: the catalogue of the paper's parts.

        Raises:
            FabricError: the file cannot be read, or is not TOML.
        """
        source = path if path is not None else files("fireflyer.fabric") / "catalogue.toml"
        try:
            return cls(tomllib.loads(source.read_text()), str(path or "catalogue"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise FabricError(f"cannot read the catalogue {path}: {error}") from None

    def entry(self, kind: str, name: str) -> dict[str, Any]:
        """Returns a section.

        Raises:
            FabricError: the catalogue has no such section.
        """
        section = self._sections.get(kind)
        found = section.get(name) if isinstance(section, dict) else None
        if not isinstance(found, dict):
            raise FabricError(f"{self._origin}: no section [{kind}.{name}]; add it, with a source")
        return found

    def number(self, kind: str, name: str, key: str) -> int:
        """Returns a whole number that needs no source, e.g. the GPUs of a node."""
        found = self.entry(kind, name).get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise FabricError(
                f"{self._origin}: [{kind}.{name}] {key} = {found!r}: expected a whole number from 1"
            )
        return found

    def value(self, kind: str, name: str, key: str) -> Value:
        """Returns a figure with its source. An absent figure is unknown.

        Raises:
            FabricError: the figure has no source, or is no number.
        """
        found = self.entry(kind, name).get(key)
        if found is None:
            return Value(None, f"[{kind}.{name}] has no {key}")
        amount = found.get("value") if isinstance(found, dict) else None
        source = found.get("source") if isinstance(found, dict) else None
        if not isinstance(source, str) or not source:
            raise FabricError(
                f"{self._origin}: [{kind}.{name}] {key} has no source; write "
                f'{key} = {{ value = ..., source = "..." }}'
            )
        if amount == UNKNOWN:
            return Value(None, source)
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
            raise FabricError(
                f"{self._origin}: [{kind}.{name}] {key} = {amount!r}: expected a number or "
                f'"{UNKNOWN}"'
            )
        return Value(float(amount), source)

    def known(self, kind: str, name: str, key: str) -> float:
        """Returns a figure that must be known, because a result depends on it.

        Raises:
            FabricError: the figure is unknown.
        """
        found = self.value(kind, name, key)
        if found.amount is None:
            raise FabricError(
                f"{key} of {kind} {name!r} is unknown ({found.source}); "
                "give a catalogue with the figure and its source"
            )
        return found.amount
