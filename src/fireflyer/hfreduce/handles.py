"""Handles of `ProcessGroup.reconfigure`: each member gives its own to a manager, which tells all to all."""

import uuid
from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from fireflyer.errors import ConfigError


class Handle(msgspec.Struct, frozen=True):
    """One member.

    Attributes:
        id: of the group object, for as long as it lives.
        store: "host:port" of the store that it offers for a rendezvous.
        global_rank: read by torchft's flight recorder; hfreduce has none.
    """

    id: str
    store: str
    global_rank: int | None = None


class Member:
    """This process's handle, and the store behind it.

    Args:
        host: address at which the others reach this process. The store listens on all, as torch's do.
    """

    def __init__(self, host: str) -> None:
        self._store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        self.handle = Handle(uuid.uuid4().hex, f"{host}:{self._store.port}")

    def place(self, handles: object, number: int) -> tuple[str, int, int]:
        """Finds this member among those of a new group.

        Args:
            handles: of all members, in the order of their ranks.
            number: of the group to form, another one each time.

        Returns:
            The address of the store of the first member, with a prefix; rank and number of ranks.

        Raises:
            ConfigError: no such list, or this member is not in it.
        """
        if not isinstance(handles, Sequence) or isinstance(handles, str):
            raise ConfigError(
                "reconfigure needs a list of handles in the order of ranks, not a set"
            )
        try:
            members = [msgspec.json.decode(text, type=Handle) for text in handles]
        except (msgspec.MsgspecError, TypeError) as error:
            raise ConfigError(f"reconfigure: a handle is none of hfreduce's: {error}") from error
        ids = [member.id for member in members]
        if self.handle.id not in ids:
            raise ConfigError("reconfigure: this group's own handle is not among those given")
        return f"{members[0].store}/hfreduce/{number}", ids.index(self.handle.id), len(members)
