"""Checks for optional dependencies."""

import importlib.util


def need_torch(part: str) -> None:
    """Checks that torch is installed, without importing it.

    Raises:
        ModuleNotFoundError: torch is missing; the message says what to install for `part`.
    """
    if importlib.util.find_spec("torch") is None:
        message = f"{part} needs torch: pip install 'fireflyer[torch]'"
        raise ModuleNotFoundError(message, name="torch")
