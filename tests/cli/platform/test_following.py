"""What a follower of a task's output writes, and when."""

import io
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fireflyer.cli.run import follow
from fireflyer.cli.run.follow import HELD_S, WAIT_S, Tail


class Chunk(msgspec.Struct):
    data: bytes
    next_offset: int
    end: bool


class Log:
    """In the place of the client: gives these pieces, empty ones where nothing came in time."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.left = list(pieces)
        self.waited: list[float] = []
        self.offset = 0

    def read_log_chunk(
        self, _task: str, _rank: int, offset: int, _attempt: int, wait_s: float
    ) -> Chunk:
        assert offset == self.offset
        self.waited.append(wait_s)
        data = self.left.pop(0)
        self.offset += len(data)
        return Chunk(data, self.offset, not self.left)


class Writes(io.BytesIO):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[bytes] = []

    def write(self, data: Any) -> int:
        self.made.append(bytes(data))
        return super().write(data)


def written(pieces: Sequence[bytes], *, mark: bool = False) -> tuple[list[bytes], list[float]]:
    log, out = Log(pieces), Writes()
    client: Any = log
    tail = Tail(client, "t1", [3], out, mark=mark)
    tail.start(1)
    tail.finish()
    return out.made, log.waited


def test_a_line_that_comes_in_pieces_is_written_whole() -> None:
    made, waited = written([b"args", b" []", b" rank 0\nnext\nbeg", b"un\n", b""])
    assert made == [b"args [] rank 0\nnext\n", b"begun\n"]
    assert waited == [WAIT_S, HELD_S, HELD_S, HELD_S, WAIT_S]


def test_what_waits_for_no_end_of_its_line_is_written() -> None:
    """A question, a progress bar, and a line without end."""
    made, _ = written([b"sure? ", b"", b"10%\r", b"2", b"0%\r", b"x" * 70_000, b"", b"end"])
    assert made == [b"sure? ", b"10%\r", b"20%\r", b"x" * 70_000, b"end"]


def test_lines_of_many_ranks_are_whole_and_bear_their_rank() -> None:
    made, waited = written([b"a", b"", b"b\n\nc\r", b"d"], mark=True)
    assert made == [b"3| ab\n3| \n", b"3| c\rd\n"]
    assert set(waited) == {WAIT_S}


def test_a_message_begins_a_line_where_both_go_to_one_place(
    capfd: pytest.CaptureFixture[str],
) -> None:
    client: Any = Log([b"done\nhalf", b"", b"", b" a line\n"])
    tail = Tail(client, "t1", [0], sys.stderr.buffer, mark=False)
    tail.start(1)
    tail.finish()
    tail._write(b"amid")
    for words in ("first", "second"):
        with tail.aside():
            sys.stderr.write(f"{words}\n")
            sys.stderr.flush()
    assert capfd.readouterr().err == "done\nhalf a line\namid\nfirst\nsecond\n"


class Platform(Log):
    """A task that goes on: its log has more lines, and its history no further event."""

    def task_at(self, _task: str) -> tuple[Any, int]:
        return SimpleNamespace(attempt=1, state="running"), 7

    def events(self, **_: Any) -> list[Any]:
        raise AssertionError("the reader is gone, and the history is waited for")


def test_following_ends_with_the_reader_of_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    platform = Platform([b"first\n", b"second\n", b"third\n"])
    monkeypatch.setattr(follow, "Client", lambda _home: platform)
    with open(writing, "wb", buffering=0) as out:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out))
        with pytest.raises(BrokenPipeError):
            follow.print_log(None, "t1", 0, None, follow=True)
    assert platform.left == [b"second\n", b"third\n"]
