"""Cores that a rank may use, and the decision whether waiting threads may spin on them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fireflyer.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")


class HasCores(Protocol):
    """Fields of a `RankInfo` that describe the rank's cores."""

    @property
    def cpus(self) -> tuple[int, ...]: ...

    @property
    def quota(self) -> float: ...

    @property
    def spin(self) -> bool | None: ...


def chosen() -> tuple[int, ...]:
    """Returns the cores for the engine's threads; () if FIREFLYER_HFREDUCE_CPUS is unset.

    The variable is a list such as `0-3,8`.

    Raises:
        ConfigError: the value is not such a list, or names a core that this process may not use.
    """
    text = os.environ.get("FIREFLYER_HFREDUCE_CPUS", "").strip()
    cpus: set[int] = set()
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise ConfigError(
                f"invalid FIREFLYER_HFREDUCE_CPUS {text!r}: expected a list of cores, e.g. 0-3,8"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        cpus.update(range(first, last + 1))
    if denied := cpus - os.sched_getaffinity(0):
        raise ConfigError(
            f"invalid FIREFLYER_HFREDUCE_CPUS {text!r}: this process may not use core {min(denied)}"
        )
    return tuple(sorted(cpus))


def usable() -> tuple[int, ...]:
    """Returns the cores on which this rank's collectives may run."""
    return chosen() or tuple(sorted(os.sched_getaffinity(0)))


def spin_wanted() -> bool | None:
    """Returns FIREFLYER_HFREDUCE_SPIN: True for 1, False for 0, None if unset.

    Raises:
        ConfigError: the variable has another value.
    """
    text = os.environ.get("FIREFLYER_HFREDUCE_SPIN", "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"invalid FIREFLYER_HFREDUCE_SPIN {text!r}: expected 0 or 1")
    return None if not text else text == "1"


def quota(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Returns the lowest CPU quota of this process's control groups, in cores; 0.0: no quota."""
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


def may_spin(infos: Sequence[HasCores]) -> bool:
    """Returns True if each rank of a machine has a core to itself; equal on all ranks of the machine.

    Args:
        infos: infos of all ranks on the machine, in order of rank. If `spin` of the first info is
            not None, it is the result.
    """
    if infos[0].spin is not None:
        return infos[0].spin
    cpus = {cpu for info in infos for cpu in info.cpus}
    quotas = [info.quota for info in infos if info.quota]
    return len(infos) <= min([len(cpus), *quotas])
