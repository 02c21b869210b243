"""A setting in force."""

from typing import Any

import msgspec

HIDDEN = "(set; not shown)"
DEFAULT = "default"


class Setting(msgspec.Struct):
    """Value of one key of a section, and where it comes from."""

    section: str
    key: str
    value: Any
    source: str
