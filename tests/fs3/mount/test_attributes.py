"""Attributes set while a file is written: seen at once on the mount, reported at close at the latest."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fs3.client.conftest import Cluster
from tests.fs3.mount.conftest import mount

from fireflyer.fs3.client import Client
from fireflyer.fs3.meta import messages
from fireflyer.fs3.meta.messages import Request

OLD_NS = 5_000_000_001


@pytest.fixture
def calls(calm: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[messages.Call]:
    """Calls of the metadata service since the test began."""
    seen: list[messages.Call] = []
    context = calm.service._context

    def recording(request: Request, now: int) -> Any:
        if not isinstance(request.call, messages.KeepAlive):
            seen.append(request.call)
        return context(request, now)

    monkeypatch.setattr(calm.service, "_context", recording)
    return seen


@pytest.fixture(scope="module")
def caching(calm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mount on which nothing that was read becomes old during a test."""
    with mount(calm, tmp_path_factory, "--cache", "600") as one:
        yield one.directory


def test_a_directory_is_listed_with_the_attributes_of_its_entries(
    caching: Path, fs: Client, calls: list[messages.Call]
) -> None:
    fs.mkdir("/large")
    names = {f"{number:0200}" for number in range(400)}  # more than the kernel asks for at once
    for name in names:
        fs.symlink("target", f"/large/{name}")
    calls.clear()
    assert set(os.listdir(caching / "large")) == names
    for name in names:
        assert os.lstat(caching / "large" / name).st_size == len("target")
    kinds = {type(call) for call in calls}
    assert kinds == {messages.Stat, messages.ReadDirectory}
    assert sum(type(call) is messages.Stat for call in calls) <= 3  # of the directory itself


def test_unpacking_a_file_takes_three_calls(
    caching: Path, fs: Client, calls: list[messages.Call]
) -> None:
    place = caching
    os.listdir(place)  # the kernel knows the directory
    calls.clear()
    file = os.open(place / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(file, b"bytes")
    os.fchown(file, 12, 34)
    os.fchmod(file, 0o644)
    os.utime(file, ns=(OLD_NS, OLD_NS + 1))
    for found in (os.fstat(file), os.stat(place / "f")):  # without a call
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (12, 34, 0o644)
        assert (found.st_atime_ns, found.st_mtime_ns) == (OLD_NS, OLD_NS + 1)
        assert found.st_ctime_ns > OLD_NS + 1
    os.close(file)
    kinds = [type(call) for call in calls]
    assert kinds == [messages.Stat, messages.Create, messages.SetAttributes]  # the first: a lookup
    there = fs.stat("/f")
    assert (there.st_uid, there.st_gid, there.st_mode & 0o7777, there.st_size) == (12, 34, 0o644, 5)
    assert (there.st_atime_ns, there.st_mtime_ns) == (OLD_NS, OLD_NS + 1)
    (place / "f").unlink()


def test_other_clients_see_at_once_that_somebody_loses_access(place: Path, fs: Client) -> None:
    with open(place / "f", "wb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o666)
        file.write(b"secret")
        os.fchmod(file.fileno(), 0o600)
        assert fs.stat("/f").st_mode & 0o7777 == 0o600
        file.write(b"more")
        os.fchown(file.fileno(), 12, -1)  # root may read it still
        assert fs.stat("/f").st_uid == 0
        file.write(b"more")
        os.fchown(file.fileno(), 13, -1)
        assert fs.stat("/f").st_uid == 13
        file.write(b"more")
        os.fchmod(file.fileno(), 0o4755)  # bits that the metadata service judges
        assert fs.stat("/f").st_mode & 0o7777 == 0o4755
    assert fs.stat("/f").st_size == len(b"secretmoremoremore")


def test_a_write_after_the_times_were_set_counts_as_the_newest(place: Path, fs: Client) -> None:
    with open(place / "f", "wb", buffering=0) as file:
        file.write(b"before")
        os.utime(file.fileno(), ns=(OLD_NS, OLD_NS))
        file.write(b"after")
        assert os.fstat(file.fileno()).st_mtime_ns > OLD_NS
        os.fsync(file.fileno())
        there = fs.stat("/f")
        assert there.st_atime_ns == OLD_NS
        assert there.st_mtime_ns > OLD_NS
        file.write(b"again")
        os.utime(file.fileno(), ns=(OLD_NS, OLD_NS))
        file.truncate(3)
    assert fs.stat("/f").st_mtime_ns > OLD_NS
    assert (place / "f").read_bytes() == b"bef"


def test_a_truncation_elsewhere_does_not_lose_what_was_set(place: Path, fs: Client) -> None:
    with open(place / "f", "wb", buffering=0) as file:
        file.write(b"0123456789")
        os.fsync(file.fileno())
        file.write(b"abc")
        os.fchmod(file.fileno(), 0o666)
        with fs.open("/f", "r+b") as other:
            other.truncate(4)
    assert fs.stat("/f").st_mode & 0o7777 == 0o666
