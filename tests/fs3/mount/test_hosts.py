"""Two mounts on two hosts of a lab, and kills of every role under a mount."""

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.draws import cases
from tests.fs3.mount.conftest import why_not
from tests.fs3.soak.cluster import Cluster, Shape
from tests.fs3.soak.mount_soak import mounted, soak
from tests.waiting import LIMIT_S

from fireflyer.lab import Lab, namespaces

MISSING = namespaces.why_not()
pytestmark = [
    pytest.mark.full,
    pytest.mark.netns,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
SIDES = st.integers(0, 1)
NAMES = st.sampled_from("abcd")
DATA = st.binary(max_size=300) | st.builds(
    lambda size, seed: bytes([seed]) * size, st.integers(1, 600_000), st.integers(1, 255)
)
PLACES = st.integers(0, 600_000)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Mounts of one file system on hosts 1 and 2, whose kernels keep no names."""
    folder = tmp_path_factory.mktemp("hosts")
    if reason := why_not(tmp_path_factory.mktemp("none")):
        pytest.skip(reason)
    with Lab(5) as lab:
        cluster = Cluster(lab, folder, Shape())
        cluster.start()
        with (
            mounted(cluster, 1, folder / "one", "--cache", "0") as one,
            mounted(cluster, 2, folder / "two", "--cache", "0") as two,
        ):
            yield [one, two]


class Hosts(RuleBasedStateMachine):
    """Programs on two hosts that open, change and close files in turns or at once.

    The model is one directory: what is closed on one host is what the other opens. Locks hold
    between the open files of one host.
    """

    sides: list[Path]

    def __init__(self) -> None:
        super().__init__()
        for name in os.listdir(self.sides[0]):
            os.unlink(self.sides[0] / name)
        self.files: dict[str, bytes] = {}

    @rule(side=SIDES, name=NAMES, data=DATA)
    def write(self, side: int, name: str, data: bytes) -> None:
        (self.sides[side] / name).write_bytes(data)
        self.files[name] = data

    @rule(data=DATA, other=DATA)
    def write_at_once(self, data: bytes, other: bytes) -> None:
        """A file on each host, by two threads."""
        pairs = [(0, "a", data), (1, "b", other)]
        threads = [
            threading.Thread(target=(self.sides[s] / n).write_bytes, args=(d,)) for s, n, d in pairs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        self.files.update(a=data, b=other)

    @rule(side=SIDES, name=NAMES, data=DATA)
    def append(self, side: int, name: str, data: bytes) -> None:
        with open(self.sides[side] / name, "ab") as file:
            file.write(data)
        self.files[name] = self.files.get(name, b"") + data

    @rule(side=SIDES, name=NAMES, at=PLACES, data=DATA)
    def overwrite(self, side: int, name: str, at: int, data: bytes) -> None:
        if name not in self.files:
            return
        with open(self.sides[side] / name, "r+b") as file:
            file.seek(at)
            file.write(data)
        if data:
            before = self.files[name].ljust(at, b"\0")
            self.files[name] = before[:at] + data + before[at + len(data) :]

    @rule(side=SIDES, name=NAMES, size=PLACES)
    def cut(self, side: int, name: str, size: int) -> None:
        if name in self.files:
            os.truncate(self.sides[side] / name, size)
            self.files[name] = self.files[name][:size].ljust(size, b"\0")

    @rule(side=SIDES, name=NAMES, data=DATA)
    def fsync_shows_an_open_file(self, side: int, name: str, data: bytes) -> None:
        with open(self.sides[side] / name, "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
            assert (self.sides[1 - side] / name).read_bytes() == data
        self.files[name] = data

    @rule(side=SIDES, name=NAMES)
    def read(self, side: int, name: str) -> None:
        if name in self.files:
            assert (self.sides[side] / name).read_bytes() == self.files[name]
            assert os.stat(self.sides[side] / name).st_size == len(self.files[name])
        else:
            with pytest.raises(FileNotFoundError):
                os.stat(self.sides[side] / name)

    @rule(side=SIDES, name=NAMES, to=NAMES)
    def rename(self, side: int, name: str, to: str) -> None:
        if name in self.files:
            os.rename(self.sides[side] / name, self.sides[side] / to)
            self.files[to] = self.files.pop(name)

    @rule(side=SIDES, name=NAMES)
    def unlink(self, side: int, name: str) -> None:
        if self.files.pop(name, None) is not None:
            os.unlink(self.sides[side] / name)

    @rule(side=SIDES)
    def lock(self, side: int) -> None:
        """The lock of another open file of the host is respected; after it is free, it is given."""
        with open(self.sides[side] / "lock", "wb") as one, open(one.name, "wb") as two:
            fcntl.flock(one, fcntl.LOCK_EX)
            with pytest.raises(BlockingIOError):
                fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(one, fcntl.LOCK_UN)
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.files["lock"] = b""

    @invariant()
    def names_are_the_same(self) -> None:
        for side in self.sides:
            assert sorted(os.listdir(side)) == sorted(self.files)


def test_programs_on_two_hosts_see_what_was_closed(sides: list[Path]) -> None:
    machine: Any = type("Here", (Hosts,), {"sides": sides})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=cases(30),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_mount_loses_nothing_while_every_role_is_killed(tmp_path: Path) -> None:
    if reason := why_not(tmp_path):
        pytest.skip(reason)
    summary = soak(20.0, 3, tmp_path / "soak", 2, 4.0)
    assert not summary.problems
    assert sum(summary.kills.values()) == 5
    assert all(summary.operations.get(kind) for kind in ("write", "read", "map_write", "truncate"))
