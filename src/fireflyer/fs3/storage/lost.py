"""What of a target's folder is lost: all of it, its store, or files of a store that is open."""

import os
from pathlib import Path

from fireflyer.fs3.manager.chains import HOLDERS, Chain, Member, Public

NAMED = 3
"""Files that are named, of those that are missing."""


def _holds(member: Member) -> bool:
    """Whether the chain serves with what that member holds, or did last."""
    return member.state in HOLDERS or member.state is Public.SERVING


def no_folder(chain: Chain, target: int, folder: Path) -> str:
    """Why an empty folder must not be made there for a target that has none; "": it may be.

    It may where others of the chain hold what it held, so that it is filled anew or given up for theirs.
    """
    holders = [member for member in chain.members if _holds(member)]
    if len(holders) != 1 or holders[0].target != target or not holders[0].store:
        return ""
    return (
        f"its folder is missing: {folder}, and no other target of chain {chain.id} holds what it held: "
        "put it back; an empty one is not made in its place"
    )


def other_store(chain: Chain, target: int, store: int, folder: Path) -> str:
    """What is wrong where a target has another store than its chain last served with; "": nothing."""
    last = (m for m in chain.members if m.target == target and m.state is Public.LASTSRV)
    if all(member.store in (0, store) for member in last):
        return ""
    return (
        f"its store is new: {folder} was lost, emptied or not mounted, and chain {chain.id} served with "
        "what was there: put that in the place of this folder; it is filled anew where another target of "
        "the chain serves"
    )


class Files:
    """The files of one open store, as they were seen. Data files stay; a log goes after a later one came."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data: set[str] = set()
        self._log = ""

    def missing(self) -> str:
        """What is wrong with those that were there at the last look; "" if nothing is."""
        try:
            data, log = self._look()
            if (
                log < self._log
            ):  # the next one may have come, and this one gone, while names were read
                data, log = self._look()
        except OSError:
            return ""  # the folder itself is looked at elsewhere
        gone = sorted(self._data - data) + ([self._log] if log < self._log else [])
        self._data, self._log = data, log
        if not gone:
            return ""
        more = f" and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
        return (
            f"files of its store were removed while it was open: {', '.join(gone[:NAMED])}{more} in "
            f"{self._folder}: what they hold ends with this process. Where another target of its chain "
            "serves, end the node, remove that folder and start it: it is filled anew. Where none does, "
            "copy the files of the chain first"
        )

    def _look(self) -> tuple[set[str], str]:
        names = os.listdir(self._folder)
        data = {name for name in names if name.startswith("data-")}
        return data, max((name for name in names if name.startswith("log-")), default="")
