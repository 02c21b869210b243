"""Which cores a rank may use, and whether its waiters may spin on them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fireflyer.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")


class HasCores(Protocol):
    """What a rank's card says of its cores."""

    @property
    def cpus(self) -> tuple[int, ...]: ...

    @property
    def quota(self) -> float: ...

    @property
    def spin(self) -> bool | None: ...


def chosen() -> tuple[int, ...]:
    """FIREFLYER_HFREDUCE_CPUS, a list as in `0-3,8`: where the engine's own threads may run; () if unset.

    Raises:
        ConfigError: it is no such list, or names a core that this process may not use.
    """
    text = os.environ.get("FIREFLYER_HFREDUCE_CPUS", "").strip()
    cpus: set[int] = set()
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise ConfigError(f"FIREFLYER_HFREDUCE_CPUS={text!r}: not a list of cores like 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        cpus.update(range(first, last + 1))
    if denied := cpus - os.sched_getaffinity(0):
        raise ConfigError(
            f"FIREFLYER_HFREDUCE_CPUS={text!r}: this process may not use core {min(denied)}"
        )
    return tuple(sorted(cpus))


def usable() -> tuple[int, ...]:
    """The cores that this rank's collectives may run on."""
    return chosen() or tuple(sorted(os.sched_getaffinity(0)))


def spin_wanted() -> bool | None:
    """FIREFLYER_HFREDUCE_SPIN: True for 1, False for 0, None if unset.

    Raises:
        ConfigError: it is something else.
    """
    text = os.environ.get("FIREFLYER_HFREDUCE_SPIN", "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"FIREFLYER_HFREDUCE_SPIN={text!r}: neither 0 nor 1")
    return None if not text else text == "1"


def quota(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float:
    """The least CPU quota of this process's control groups, in cores; 0.0 where there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return 0.0
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folders = [root / own, *(root / own).parents]
    least = 0.0
    for folder in folders[: folders.index(root) + 1]:
        try:
            limit, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if limit != "max":
            cores = int(limit) / int(period)
            least = min(least, cores) if least else cores
    return least


def may_spin(cards: Sequence[HasCores]) -> bool:
    """Whether every rank of one machine has a core to itself: computed alike by all from their cards.

    Args:
        cards: of all ranks on that machine, in order of rank; the wish of the first counts.
    """
    if cards[0].spin is not None:
        return cards[0].spin
    cpus = {cpu for card in cards for cpu in card.cpus}
    quotas = [card.quota for card in cards if card.quota]
    return len(cards) <= min([len(cpus), *quotas])
