"""Handles of `ProcessGroup.reconfigure`, which a manager collects and distributes."""

import uuid
from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from fireflyer.errors import ConfigError


class Handle(msgspec.Struct, frozen=True):
    """Handle of one member.

    Attributes:
        id: identifies the group object for its lifetime.
        store: "host:port" of the store that the member offers for a rendezvous.
        global_rank: for torchft's flight recorder; unused in hfreduce.
    """

    id: str
    store: str
    global_rank: int | None = None


class Member:
    """This process's handle, and the store behind it.

    Args:
        host: address at which the other members reach this process. The store listens on all
            addresses, as torch's stores do.
    """

    def __init__(self, host: str) -> None:
        self._store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        self.handle = Handle(uuid.uuid4().hex, f"{host}:{self._store.port}")

    def place(self, handles: object, number: int) -> tuple[str, int, int]:
        """Finds this member among the members of a new group.

        Args:
            handles: encoded handles of all members, in order of rank.
            number: number of the group to form; must differ each time.

        Returns:
            "host:port/prefix" of the first member's store, the rank of this member, and the number
            of ranks.

        Raises:
            ConfigError: `handles` is not a list of handles, or this member is not in it.
        """
        if not isinstance(handles, Sequence) or isinstance(handles, str):
            raise ConfigError(
                "invalid handles for reconfigure: expected a list in the order of ranks"
            )
        try:
            members = [msgspec.json.decode(text, type=Handle) for text in handles]
        except (msgspec.MsgspecError, TypeError) as error:
            raise ConfigError(f"reconfigure: invalid hfreduce handle: {error}") from error
        ids = [member.id for member in members]
        if self.handle.id not in ids:
            raise ConfigError("reconfigure: the handles must include this group's own")
        return f"{members[0].store}/hfreduce/{number}", ids.index(self.handle.id), len(members)
