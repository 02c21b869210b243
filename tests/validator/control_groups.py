"""Control groups of version 1 or 2 that slow what runs in them down, for tests."""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

ROOT = Path("/sys/fs/cgroup")

Controller = Literal["cpu", "io"]

V1 = {"cpu": ROOT / "cpu", "io": ROOT / "blkio"}
V1_FILE = {"cpu": "cpu.cfs_quota_us", "io": "blkio.throttle.write_bps_device"}


class Missing(Exception):
    """This machine has no such control group; the text says why."""


class Group:
    """A control group with one controller. A context manager; leaving it removes the group."""

    def __init__(self, controller: Controller, name: str) -> None:
        """
        Raises:
            Missing: the controller is not available, or needs root.
        """
        if os.geteuid() != 0:
            raise Missing("control groups need root")
        self._controller = controller
        self._one = (V1[controller] / V1_FILE[controller]).exists() or controller == "io"
        base = V1[controller]
        if not (base / "cgroup.procs").exists():
            self._one, base = False, ROOT
            known = ROOT / "cgroup.controllers"
            if not known.exists() or controller not in known.read_text().split():
                raise Missing(f"neither version of control groups has the controller {controller}")
            try:
                (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError as error:
                raise Missing(f"the controller {controller} cannot be used: {error}") from None
        self._path = base / f"fireflyer-{os.getpid()}-{name}"

    def __enter__(self) -> Self:
        try:
            self._path.mkdir()
        except OSError as error:
            raise Missing(f"no control group can be made: {error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._path.rmdir()

    def limit_cpus(self, cpus: float) -> None:
        """Leaves the group so many CPUs."""
        quota = round(100_000 * cpus)
        if self._one:
            (self._path / "cpu.cfs_period_us").write_text("100000")
            (self._path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._path / "cpu.max").write_text(f"{quota} 100000")

    def limit_disk(self, folder: Path, bytes_per_s: int) -> None:
        """Throttles reads and writes of the disk of a folder.

        Raises:
            Missing: the folder lies on no block device.
        """
        device = disk_of(folder)
        try:
            if self._one:
                for what in ("read", "write"):
                    file = self._path / f"blkio.throttle.{what}_bps_device"
                    file.write_text(f"{device} {bytes_per_s}")
            else:
                line = f"{device} rbps={bytes_per_s} wbps={bytes_per_s}"
                (self._path / "io.max").write_text(line)
        except OSError as error:
            raise Missing(f"the disk {device} cannot be throttled: {error}") from None

    def run(self, function: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
        """Calls a function in a process within the group.

        Raises:
            RuntimeError: the process ended without an answer.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                (self._path / "cgroup.procs").write_text(str(os.getpid()))
                data = msgspec.json.encode(function())
                while data:
                    data = data[os.write(writing, data) :]
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        if not data:
            raise RuntimeError("the process in the control group ended without an answer")
        return msgspec.json.decode(data, type=dict[str, list[float]])


def disk_of(folder: Path) -> str:
    """Returns MAJOR:MINOR of the whole disk under a folder.

    Raises:
        Missing: the folder lies on no block device.
    """
    number = os.stat(folder).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not block.exists():
        raise Missing(f"{folder} lies on no block device")
    disk = block.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    return (disk / "dev").read_text().strip()
