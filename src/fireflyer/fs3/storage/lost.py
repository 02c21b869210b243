"""Losses in a target's folder: the whole folder, its store, or files of a store that is open."""

import os
from pathlib import Path

from fireflyer.fs3.manager.chains import HOLDERS, Chain, Member, Public

NAMED = 3
"""Maximum number of missing files that a message names."""


def _holds(member: Member) -> bool:
    """Returns whether the chain serves, or last served, with what that member holds."""
    return member.state in HOLDERS or member.state is Public.SERVING


def no_folder(chain: Chain, target: int, folder: Path) -> str:
    """Returns why an empty folder must not be made for a target without one; "": it may be made.

    It may be made if other members of the chain hold the same data: the target is then filled anew,
    or its data given up for theirs.
    """
    holders = [member for member in chain.members if _holds(member)]
    if len(holders) != 1 or holders[0].target != target or not holders[0].store:
        return ""
    return (
        f"its folder is missing: {folder}, and no other target of chain {chain.id} has its data: "
        "restore the folder; it is not replaced by an empty one"
    )


def other_store(chain: Chain, target: int, store: int, folder: Path) -> str:
    """Returns the fault if a target has another store than its chain last served with; "": none."""
    last = (m for m in chain.members if m.target == target and m.state is Public.LASTSRV)
    if all(member.store in (0, store) for member in last):
        return ""
    return (
        f"its store is new: {folder} was lost, emptied or not mounted, and chain {chain.id} served with "
        "the former store: restore that folder. If another target of the chain serves, the new store is "
        "filled from it"
    )


class Files:
    """Files of one open store, as last seen. Data files stay; a log goes after a later one came."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data: set[str] = set()
        self._log = ""

    def missing(self) -> str:
        """Returns the fault if files of the last look are missing; "" if none are."""
        try:
            data, log = self._look()
            if (
                log < self._log
            ):  # while names were read, the next one may have come, and this one gone
                data, log = self._look()
        except OSError:
            return ""  # the folder itself is checked elsewhere
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

    def _look(self) -> tuple[set[str], str]:
        names = os.listdir(self._folder)
        data = {name for name in names if name.startswith("data-")}
        return data, max((name for name in names if name.startswith("log-")), default="")
