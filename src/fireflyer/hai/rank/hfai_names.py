"""HAI Platform's own names, for scripts written for HAI Platform (`hfai.client` of
HFAiLab/hai-platform).

| HAI Platform | here |
|---|---|
| `receive_suspend_command()` | `suspend_requested()`; HAI: on rank 0 alone; here: on every rank |
| `go_suspend()` | `suspended()` |
| `set_whole_life_state(n)`, `get_whole_life_state()` | the same: a number kept across attempts |
"""

import os
from pathlib import Path

from fireflyer.errors import Corrupted
from fireflyer.hai.home import write_private
from fireflyer.hai.rank import suspend_requested, suspended, task

__all__ = [
    "get_whole_life_state",
    "go_suspend",
    "receive_suspend_command",
    "set_whole_life_state",
]

receive_suspend_command = suspend_requested
go_suspend = suspended

_outside = 0
"""Whole-life state outside a task."""


def _file() -> Path | None:
    here = task()
    return here.directory / "whole_life_state" if "FIREFLYER_TASK_DIR" in os.environ else None


def set_whole_life_state(state: int) -> None:
    """Stores a number with the task, for later attempts and other ranks. The number is replaced
    atomically; the last call wins. Outside a task the number lives as long as the process.

    Raises:
        TypeError: `state` is not an int.
        OSError: the task's folder cannot be written.
    """
    global _outside
    if not isinstance(state, int):
        raise TypeError(f"a whole-life state is an int, not {type(state).__name__}")
    file = _file()
    if file is None:
        _outside = state
    else:
        write_private(file, b"%d\n" % state)


def get_whole_life_state() -> int:
    """Returns the number that was set last; 0 if no number was set.

    Raises:
        Corrupted: the file with the number is damaged.
    """
    file = _file()
    if file is None:
        return _outside
    try:
        return int(file.read_bytes())
    except FileNotFoundError:
        return 0
    except ValueError:
        raise Corrupted(
            f"{file} does not hold a number; remove it or set the state again"
        ) from None
