"""Detects whether a target's folder, its store, or files of an open store were lost."""

import os
from pathlib import Path

from fireflyer.fs3.manager.chains import HOLDERS, Chain, Member, Public

NAMED = 3
"""Maximum number of missing files that a message names."""


def _holds(member: Member) -> bool:
    """Returns whether the chain serves, or last served, with that member's data."""
    return member.state in HOLDERS or member.state is Public.SERVING


def missing_folder_fault(chain: Chain, target: int, folder: Path) -> str:
    """Returns why a missing folder must not be replaced by an empty one; "" if it may be.

    An empty folder may replace a missing one if other members of the chain hold the same data: the
    target then syncs from those members.
    """
    holders = [member for member in chain.members if _holds(member)]
    if len(holders) != 1 or holders[0].target != target or not holders[0].store:
        return ""
    return (
        f"its folder is missing: {folder}, and no other target of chain {chain.id} has its data: "
        "restore the folder; it is not replaced by an empty one"
    )


def replaced_store_fault(chain: Chain, target: int, store: int, folder: Path) -> str:
    """Returns the fault of a target if its chain last served with another store than `store`, else ""."""
    last = (m for m in chain.members if m.target == target and m.state is Public.LASTSRV)
    if all(member.store in (0, store) for member in last):
        return ""
    return (
        f"its store is new: {folder} was lost, emptied or not mounted, and chain {chain.id} served with "
        "the former store: restore that folder. If another target of the chain serves, the new store is "
        "filled from it"
    )


class Files:
    """Files of one open store at the last check.

    Data files are never removed; a log is removed after a newer log is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data: set[str] = set()
        self._log = ""

    def missing(self) -> str:
        """Returns the fault if files of the last check are missing; "" if none are."""
        try:
            data, log = self._list()
            if log < self._log:  # a newer log may have replaced the former log meanwhile
                data, log = self._list()
        except OSError:
            return ""  # another check covers the folder itself
        gone = sorted(self._data - data) + ([self._log] if log < self._log else [])
        self._data, self._log = data, log
        if not gone:
            return ""
        more = f" and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
        return (
            f"files of its store were removed while it was open: {', '.join(gone[:NAMED])}{more} in "
            f"{self._folder}: their data is lost when this process ends. If another target of the chain "
            "serves, end the node, remove that folder and start the node: the target is filled again. "
            "Otherwise copy the files of the chain first"
        )

    def _list(self) -> tuple[set[str], str]:
        names = os.listdir(self._folder)
        data = {name for name in names if name.startswith("data-")}
        return data, max((name for name in names if name.startswith("log-")), default="")
