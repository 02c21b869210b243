"""Errors as programs see them that know only Python's own classes."""

import errno
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fireflyer.errors import CorruptedFile, FileTimeout, FireflyerError, NoSpace, Unavailable
from fireflyer.ffrecord.convert.atomic_output import NewFolder, write_atomically
from fireflyer.fs3.client.transfer import _naming
from fireflyer.program import in_one_line
from fireflyer.storage import open_storage

Kind = type[FireflyerError]
KINDS: list[tuple[Kind, int]] = [
    (NoSpace, errno.ENOSPC),
    (Unavailable, errno.EIO),
    (CorruptedFile, errno.EIO),
    (FileTimeout, errno.ETIMEDOUT),
]


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_a_full_disk_is_one_for_programs_that_catch_oserror(kind: Kind, number: int) -> None:
    raised = kind("chain 3 is full: free some space")
    travelled = kind.rebuild(str(raised), raised.fields())
    for error in (raised, pickle.loads(pickle.dumps(raised)), travelled):
        with pytest.raises(OSError, match=r"^chain 3 is full: free some space$") as caught:
            raise error
        assert isinstance(caught.value, kind)
        assert caught.value.errno == number
        assert isinstance(caught.value, TimeoutError) == (number == errno.ETIMEDOUT)
        assert caught.value.retryable == (kind is not CorruptedFile)


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_their_message_is_never_replaced_by_that_of_another_file(
    kind: Kind, number: int, tmp_path: Path, capsys: Any
) -> None:
    """Code of ours that translates OSErrors leaves errors that are translated already."""

    def fail(*_: object) -> NoReturn:
        raise kind("the source is away")

    def chunks() -> Iterator[bytes]:
        yield b"some"
        fail()

    def folder() -> None:
        with NewFolder(tmp_path / "folder"):
            fail()

    def copy() -> None:
        with _naming("/asked", "/asked.part"):
            fail()

    acts: tuple[Callable[[], object], ...] = (
        lambda: write_atomically(tmp_path / "out", fail),
        lambda: open_storage(str(tmp_path)).write("out", chunks()),
        lambda: open_storage(f"memory://{tmp_path}").write("out", chunks()),
        folder,
        copy,
    )
    for act in acts:
        with pytest.raises(kind, match=r"^the source is away$"):
            act()
    assert list(tmp_path.iterdir()) == []
    assert in_one_line(fail) == 1
    assert capsys.readouterr().err == "fireflyer: the source is away\n"
