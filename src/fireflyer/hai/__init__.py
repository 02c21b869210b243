"""HAI Platform: tasks, time sharing, failure handling."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.hai.client import Client as Client


def __getattr__(name: str) -> Any:
    if name == "Client":
        from fireflyer.hai.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
