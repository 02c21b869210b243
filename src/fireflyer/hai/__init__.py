"""HAI Platform: tasks, time sharing, failure handling."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.hai.client import Client
    from fireflyer.hai.rank import (
        Task,
        heartbeat,
        saved,
        suspend_requested,
        suspended,
        task,
    )
    from fireflyer.hai.rank.hfai_names import (
        get_whole_life_state,
        go_suspend,
        receive_suspend_command,
        set_whole_life_state,
    )
    from fireflyer.hai.rank.lease import elastic, hold, in_task, lease

__all__ = [
    "Client",
    "Task",
    "elastic",
    "get_whole_life_state",
    "go_suspend",
    "heartbeat",
    "hold",
    "in_task",
    "lease",
    "receive_suspend_command",
    "saved",
    "set_whole_life_state",
    "suspend_requested",
    "suspended",
    "task",
]

# Each name is imported at its first access: every process of the platform imports this package, but
# few use these names.
_HOME = {
    "Client": "fireflyer.hai.client",
    "Task": "fireflyer.hai.rank",
    "elastic": "fireflyer.hai.rank.lease",
    "get_whole_life_state": "fireflyer.hai.rank.hfai_names",
    "go_suspend": "fireflyer.hai.rank.hfai_names",
    "heartbeat": "fireflyer.hai.rank",
    "hold": "fireflyer.hai.rank.lease",
    "in_task": "fireflyer.hai.rank.lease",
    "lease": "fireflyer.hai.rank.lease",
    "receive_suspend_command": "fireflyer.hai.rank.hfai_names",
    "saved": "fireflyer.hai.rank",
    "set_whole_life_state": "fireflyer.hai.rank.hfai_names",
    "suspend_requested": "fireflyer.hai.rank",
    "suspended": "fireflyer.hai.rank",
    "task": "fireflyer.hai.rank",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
