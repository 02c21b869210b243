"""Distributed file system of the paper (3FS): manager, meta, storage, client. See docs/guide/fs3.md.

The client's names are imported from here on their first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fireflyer.fs3.client import Client, File, Settings, connect
    from fireflyer.fs3.client.discovery import attach

_HOMES = {
    **dict.fromkeys(("Client", "File", "Settings", "connect"), "fireflyer.fs3.client"),
    "attach": "fireflyer.fs3.client.discovery",
}

__all__ = ["Client", "File", "Settings", "attach", "connect"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
