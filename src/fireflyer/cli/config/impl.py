"""Implementation of `fireflyer config`: the settings in force, and the source of each."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.cli.config.file_system import cluster_file, file_system_settings
from fireflyer.cli.config.platform import File, environment, files, platform_settings
from fireflyer.cli.config.settings import Setting
from fireflyer.cli.printing import show_result
from fireflyer.hai.home import locate
from fireflyer.program import plain


def show(where: str | None, home: Path | None, *, json: bool) -> None:
    """Prints the settings of the platform, of a file system and of the environment.

    Raises:
        ConfigError: a file holds an invalid setting.
        Corrupted: a file of the home is damaged.
    """
    settings = [
        *file_system_settings(cluster_file(where)),
        *platform_settings(locate(home)),
        *environment(),
    ]
    show_result(settings, lambda: _settings_text(settings), json=json)


def _settings_text(settings: Sequence[Setting]) -> None:
    wide = max(
        len(f"{one.key} = {_toml(one.value)}") for one in settings if len(str(one.value)) < 40
    )
    section = None
    for one in settings:
        if one.section != section:
            section = one.section
            sys.stdout.write(f"\n[{plain(section)}]\n" if section else "# file system\n")
        line = f"{one.key} = {_toml(one.value)}"
        sys.stdout.write(f"{plain(line):<{wide}}  # {plain(one.source)}\n")


def paths(where: str | None, home: Path | None, *, json: bool) -> None:
    """Prints the files that hold settings."""
    found = list(files(locate(home), cluster_file(where)))
    show_result(found, lambda: _files_text(found), json=json)


def _files_text(found: Sequence[File]) -> None:
    wide = max(len(plain(file.path)) for file in found)
    for file in found:
        missing = "" if file.exists else " (not there: the defaults hold)"
        sys.stdout.write(f"{plain(file.path):<{wide}}  {file.content}{missing}\n")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else msgspec.json.encode(value).decode()
