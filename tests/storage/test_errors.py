"""Errors of fsspec's drivers as ours: what is missing, what is refused, what may pass."""

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fireflyer.errors import Corrupted, StorageError, Unavailable
from fireflyer.storage import FsspecStorage


class WithStatus(Exception):
    """As that of aiohttp."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class WithResponse(Exception):
    """As that of botocore."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class LibraryError(Exception):
    """Neither of the system nor with a status."""


LibraryError.__module__ = "aiohttp.client_exceptions"


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """Fails in every reading call; as fsspec's HTTP, `info` and `size` call everything a missing file."""

    protocol = "failing-errors"
    cachable = False
    error: Exception | None = None
    hides = True

    def _fail(self, path: str, hides: bool) -> None:
        if Failing.error is not None:
            if hides:
                raise FileNotFoundError(path) from Failing.error
            raise Failing.error

    def size(self, path: str) -> Any:
        self._fail(path, Failing.hides)
        return None

    def info(self, path: str, **more: Any) -> Any:
        self._fail(path, Failing.hides)
        return super().info(path, **more)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        self._fail(path, False)
        return super().ls(path, detail=detail, **more)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        self._fail(path, False)
        return super().cat_file(path, start, end, **more)


@pytest.fixture
def storage() -> Iterator[FsspecStorage]:
    fsspec.register_implementation("failing-errors", Failing, clobber=True)
    yield FsspecStorage("failing-errors://errors-test")
    Failing.error, Failing.hides = None, True


def asked(call: Callable[[], Any]) -> StorageError:
    with pytest.raises(StorageError, match="errors-test/a") as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


def of_all_calls(storage: FsspecStorage) -> list[StorageError]:
    [many] = storage.read_many([("a", 0, 1)])
    assert isinstance(many, StorageError)
    calls = (lambda: storage.read("a"), lambda: storage.stamp("a"), lambda: storage.size("a"))
    return [many, *map(asked, calls), asked(lambda: storage.list("a"))]


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("kind", [WithStatus, WithResponse])
@pytest.mark.parametrize("status", [400, 401, 403, 408, 429, 500, 503])
def test_a_status_says_whether_it_may_pass(
    storage: FsspecStorage, kind: type[Exception], status: int, hides: bool
) -> None:
    Failing.error, Failing.hides = kind(status), hides
    passing = status in (408, 429, 500, 503)
    for error in of_all_calls(storage):
        assert type(error) is (Unavailable if passing else StorageError)
        assert f"status {status}" in str(error)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError("refused"), Unavailable),
        (TimeoutError(), Unavailable),
        (LibraryError("no host"), Unavailable),
        (PermissionError("no"), StorageError),
        (WithStatus(416), Corrupted),
    ],
)
def test_without_a_status_its_kind_does(
    storage: FsspecStorage, error: Exception, kind: type[Exception], hides: bool
) -> None:
    Failing.error, Failing.hides = error, hides
    assert {type(found) for found in of_all_calls(storage)} == {kind}


@pytest.mark.parametrize(
    "cause", [WithStatus(404), WithResponse(410), KeyError("a"), FileNotFoundError("a")]
)
def test_what_is_missing_stays_missing(storage: FsspecStorage, cause: Exception) -> None:
    Failing.error = cause
    assert storage.size("a") is None
    assert storage.stamp("a") == ""


def test_a_place_that_tells_no_size_is_named(storage: FsspecStorage) -> None:
    assert "does not report the size" in str(asked(lambda: storage.size("a")))
