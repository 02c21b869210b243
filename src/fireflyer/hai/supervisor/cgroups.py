"""Cgroups that enforce the limits of memory and cores on the ranks of one part of an attempt.

    <base>/fireflyer-<hash of the folder>-<task>-<attempt>-<node>

Cgroups of version 2 have one folder for both controllers; cgroups of version 1 have one folder in
each hierarchy. The engine finds the base, the supervisor creates and removes the cgroup, and the
ranks enter the cgroup before they run. `<attempt>/<node>.cgroups` lists the folders while they
exist, so that a later server can remove them if the supervisor was killed. Every
supervisor imports this module, so it must not import asyncio, which takes time and memory.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from fireflyer.hai.processes import kill

Controller = Literal["memory", "cpu"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "cpu")
WORDS = {"memory": "memory", "cpu": "cores"}

PREFIX = "fireflyer-"
"""Prefix of the names of all cgroups that this module creates. The module removes no other
cgroups."""

PERIOD_US = 100_000
"""Period of the CPU quota."""

SERVER = "fireflyer-server"
"""Cgroup of version 2 into which a server moves itself, because a cgroup whose children have limits
may not contain processes."""

REMOVE_S = 1.0
"""Maximum wait for killed processes to leave a cgroup, in seconds."""


class Base(msgspec.Struct, frozen=True):
    """Parent cgroups of the tasks' cgroups."""

    folders: dict[Controller, str] = {}
    """Folder of each usable controller."""
    missing: dict[Controller, str] = {}
    """Reason why a controller cannot be used, by controller."""

    def unheld(self) -> str:
        """Returns a text that says which limits are not enforced, and why; "" if all limits are
        enforced."""
        why: dict[str, list[str]] = {}
        for controller, reason in self.missing.items():
            why.setdefault(reason, []).append(WORDS[controller])
        return "; ".join(
            f"limits of {' and '.join(names)} are not enforced: {reason}"
            for reason, names in why.items()
        )

    def below(self, name: str) -> dict[Controller, str]:
        """Returns the folders, by controller, of the cgroup with this name below the base."""
        return {each: os.path.join(folder, name) for each, folder in self.folders.items()}


class Limits(msgspec.Struct, frozen=True):
    """Limits that apply to all ranks of a task on one node together."""

    memory_mib: int = 0
    cpus: int = 0
    """Number of cores. In both limits, 0 means no limit."""
    folders: dict[Controller, str] = {}
    """Folders of the cgroup, by controller; a limit without its controller is not enforced."""


# -- the base --------------------------------------------------------------------------------------


def find_base(root: str = "/") -> Base:
    """Finds and prepares the cgroups below which this process may create cgroups. `root`: root of
    the file system, for tests."""
    try:
        mounts = Path(root, "proc/self/mountinfo").read_text()
        own = parse_own(Path(root, "proc/self/cgroup").read_text())
    except OSError as error:
        reason = f"/proc cannot be read: {error.strerror}"
        return Base(missing=dict.fromkeys(CONTROLLERS, reason))
    found, missing = dict[Controller, str](), dict[Controller, str]()
    places = parse_mounts(mounts)
    for controller in CONTROLLERS:
        if controller in places:
            folder, why = _tried(_folder(root, places[controller], own.get(controller, "/")))
        elif "" in places:
            top = _folder(root, places[""], places[""][1])
            folder, why = _second_version(
                _folder(root, places[""], own.get("", "/")), top, controller
            )
        else:
            folder, why = "", "no cgroups are mounted"
        if folder:
            found[controller] = folder
        else:
            missing[controller] = why
    return Base(found, missing)


def parse_own(text: str) -> dict[str, str]:
    """Parses /proc/self/cgroup. Returns the cgroup of this process by controller; the key "" stands
    for version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def parse_mounts(text: str) -> dict[str, tuple[str, str]]:
    """Parses /proc/self/mountinfo. Returns the mount point, and the cgroup that is mounted there,
    by controller; the key "" stands for version 2."""
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ")[:3]
        where, path = left.split(" ")[4], left.split(" ")[3]
        if kind == "cgroup2":
            found.setdefault("", (where, path))
        elif kind == "cgroup":
            for controller in options.split(","):
                found.setdefault(controller, (where, path))
    return found


def _folder(root: str, mount: tuple[str, str], path: str) -> str:
    """Returns the folder of a cgroup, or the mount point if the cgroup is not visible below the
    mount point."""
    where, top = mount
    if top != "/" and (path == top or path.startswith(f"{top}/")):
        path = path[len(top) :]
    below = "" if path.startswith("/..") else path
    return os.path.join(root, where.lstrip("/"), below.lstrip("/")).rstrip("/")


def _second_version(own: str, top: str, controller: Controller) -> tuple[str, str]:
    """Returns a cgroup of version 2 that can be the base, or "" and the reason. Tries the cgroup of
    this process first. Then tries its parent, which a service manager may have delegated; as root,
    tries the top cgroup instead of the parent."""
    if os.path.basename(own) == SERVER:
        own = os.path.dirname(own)
    why = ""
    places = [own]
    if os.geteuid() != 0:
        places.append(os.path.dirname(own))
    elif own != top:
        places.append(top)
    for place in places:
        failure = _enable(place, controller)
        folder, failure = ("", failure) if failure else _tried(place)
        if folder:
            return folder, ""
        why = why or failure
    return "", why


def _enable(place: str, controller: Controller) -> str:
    """Enables the controller for the children of a cgroup; returns the reason if that is
    impossible. If the cgroup contains only this process, moves the process into a child first."""
    path = os.path.join(place, "cgroup.subtree_control")
    try:
        if controller in Path(path).read_text().split():
            return ""
        if controller not in Path(place, "cgroup.controllers").read_text().split():
            return f"{place} has no controller {controller}"
        try:
            _write(path, f"+{controller}")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            holders = Path(place, "cgroup.procs").read_text().split()
            if holders != [str(os.getpid())]:
                return f"{place} has other processes than the server"
            os.makedirs(os.path.join(place, SERVER), exist_ok=True)
            _write(os.path.join(place, SERVER, "cgroup.procs"), "0")
            _write(path, f"+{controller}")
    except OSError as error:
        return f"cannot create a cgroup in {place}: {error.strerror}"
    return ""


def _tried(place: str) -> tuple[str, str]:
    """Returns the folder `place` if this process can create a cgroup in it, else the reason."""
    trial = os.path.join(place, f"fireflyer-trial-{os.getpid()}")
    try:
        os.mkdir(trial)
        os.rmdir(trial)
    except OSError as error:
        return "", f"cannot create a cgroup in {place}: {error.strerror}"
    return place, ""


# -- one cgroup ------------------------------------------------------------------------------------


class Cgroup:
    """Cgroup of the ranks of one part of an attempt; its limits apply to all of them together."""

    def __init__(self, limits: Limits, note: Path) -> None:
        """Creates the cgroup. `note`: file that lists the folders of the cgroup.

        Raises:
            OSError: the cgroup cannot be created.
        """
        self._note = note
        self._folders = sorted({*limits.folders.values()})
        self._memory = limits.folders.get("memory", "") if limits.memory_mib else ""
        self.memory_mib = limits.memory_mib if self._memory else 0
        self._kills = 0
        if self._folders:
            write_note(note, self._folders)
        for folder in self._folders:
            os.makedirs(folder, exist_ok=True)
        for controller, folder in limits.folders.items():
            for name, text in settings(controller, limits, set(os.listdir(folder))):
                _write(os.path.join(folder, name), text)
        self._kills = self._counted()

    @property
    def entrances(self) -> tuple[str, ...]:
        """Files into which a rank writes 0 to enter the cgroup."""
        return tuple(os.path.join(folder, "cgroup.procs") for folder in self._folders)

    def killed(self) -> int:
        """Returns the number of processes that the kernel has killed for the memory limit since the
        last call."""
        before, self._kills = self._kills, self._counted()
        return self._kills - before

    def _counted(self) -> int:
        for name in ("memory.events", "memory.oom_control") if self._memory else ():
            with contextlib.suppress(OSError):
                words = Path(self._memory, name).read_text().split()
                return int(dict(zip(words[::2], words[1::2], strict=False)).get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        """Kills all processes in the cgroup, and removes it."""
        remove(self._note)


def settings(controller: Controller, limits: Limits, files: set[str]) -> list[tuple[str, str]]:
    """Returns the files to write in a new cgroup, and their content, in order."""
    if controller == "cpu":
        quota = limits.cpus * PERIOD_US
        if not quota:
            return []
        if "cpu.max" in files:
            return [("cpu.max", f"{quota} {PERIOD_US}")]
        return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    size = limits.memory_mib << 20
    if not size:
        return []
    if "memory.max" in files:
        wanted = [("memory.max", str(size)), ("memory.swap.max", "0")]
    else:
        wanted = [("memory.limit_in_bytes", str(size)), ("memory.memsw.limit_in_bytes", str(size))]
    return [wanted[0], *(each for each in wanted[1:] if each[0] in files)]


def note_path(attempt: Path, node: str) -> Path:
    return attempt / f"{node}.cgroups"


def write_note(path: Path, folders: Iterable[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write("".join(f"{folder}\n" for folder in folders))


def remove(note: Path) -> None:
    """Kills all processes in the cgroup that the file `note` lists, then removes the cgroup and the
    file. If the cgroup cannot be removed yet, the file stays."""
    try:
        folders = note.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    deadline = time.monotonic() + REMOVE_S
    own = [folder for folder in folders if os.path.basename(folder).startswith(PREFIX)]
    left = [folder for folder in own if not _removed(folder, deadline)]
    if not left:
        with contextlib.suppress(OSError):
            note.unlink()


def _removed(folder: str, deadline: float) -> bool:
    while True:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                return False
            with contextlib.suppress(OSError, ValueError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    kill(int(pid), signal.SIGKILL)
            time.sleep(0.005)
        else:
            return True


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
