"""Help in panels: verbs are grouped by theme, and options of a long verb by subject."""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

THEMES = {
    "Tasks": (
        "run", "ps", "show", "logs", "events", "why", "stop", "suspend", "resume", "top", "workspace",
        "dashboard",
    ),
    "Training and data": ("record", "ckpt", "experts", "prof", "plan", "bench", "demo"),
    "Storage": ("fs", "kv"),
    "Cluster": (
        "up", "down", "nodes", "drain", "undrain", "window", "validate", "faults", "failures", "ledger",
        "sim", "net", "lab",
    ),
    "Users": ("user", "group", "token", "quota", "audit"),
    "Settings": ("config", "completion"),
}  # fmt: skip
"""Verbs of `fireflyer` by theme, in the order of the overview."""


class ThemedGroup(TyperGroup):
    """Group of verbs whose overview has a panel for each theme."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        for theme, verbs in THEMES.items():
            rows = [
                (verb, self.commands[verb].get_short_help_str(width))
                for verb in verbs
                if verb in self.commands
            ]
            _panel(formatter, theme, rows)


class PanelCommand(TyperCommand):
    """Command whose options appear in the panels that they name (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            named = getattr(parameter, "rich_help_panel", None) or kind
            panels.setdefault(named, []).append(record)
        panels["Options"] = panels.pop("Options")  # common options come last
        for title, rows in panels.items():
            _panel(formatter, title, rows)


def _panel(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)
