"""Logs that grow too long lose their middle, and nothing else."""

import os
from pathlib import Path

import pytest

from fireflyer.hai.controller import log_quota, logs
from fireflyer.hai.controller.log_quota import HEAD_BYTES, LogQuota, gap, read_at, trim

LIMIT = 2 * HEAD_BYTES
LINE = b"%015d\n"


def written(path: Path, size: int) -> bytes:
    """A log of numbered lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(LINE % number for number in range(size // 16))
    path.write_bytes(data)
    return data


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_long_log_loses_its_middle_and_keeps_its_offsets(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    data = written(path, 8 * HEAD_BYTES)
    given = trim(path, LIMIT)
    assert given == len(data) - taken(path) >= 6 * HEAD_BYTES
    assert path.stat().st_size == len(data)
    assert read_at(path, 0, 1 << 30) == (0, data[:HEAD_BYTES])
    begin, tail = read_at(path, HEAD_BYTES, 1 << 30)
    assert begin > HEAD_BYTES
    assert (tail, len(tail) <= LIMIT - HEAD_BYTES) == (data[begin:], True)
    assert read_at(path, len(data), 100) == (len(data), b"")
    assert trim(path, LIMIT) == 0


def test_who_writes_goes_on_and_who_reads_is_told_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    data = written(path, 4 * HEAD_BYTES)
    with path.open("ab", buffering=0) as writer:
        trim(path, LIMIT)
        writer.write(b"the end\n")
    seen, offset, starts = b"", 0, []
    while piece := logs._read(path, offset, 100_000)[0]:
        starts.append(offset)
        seen, offset = seen + piece, logs._read(path, offset, 100_000)[1]
    head, words, tail = seen.partition(gap(read_at(path, HEAD_BYTES, 1)[0] - HEAD_BYTES))
    assert words
    assert head == data[:HEAD_BYTES]
    assert (data + b"the end\n").endswith(tail)
    assert tail.endswith(b"the end\n")
    assert offset == len(data) + 8


def test_what_is_short_or_no_log_is_left_alone(tmp_path: Path) -> None:
    short, link, pipe = tmp_path / "0.log", tmp_path / "1.log", tmp_path / "2.log"
    data = written(short, LIMIT)
    elsewhere = tmp_path / "elsewhere"
    written(elsewhere, 8 * HEAD_BYTES)
    link.symlink_to(elsewhere)
    os.mkfifo(pipe)
    assert [trim(path, LIMIT) for path in (short, link, pipe, tmp_path / "none")] == [0] * 4
    assert short.read_bytes() == data
    assert taken(elsewhere) >= 8 * HEAD_BYTES


def test_logs_are_looked_at_once_more_when_their_attempt_has_ended(tmp_path: Path) -> None:
    room = LogQuota(tmp_path, LIMIT)
    attempt = tmp_path / "t1" / "1"
    written(attempt / "0.log", HEAD_BYTES)
    assert room.look([attempt]) == 0
    written(attempt / "0.log", 4 * HEAD_BYTES)
    assert room.look([]) >= 2 * HEAD_BYTES
    written(attempt / "0.log", 8 * HEAD_BYTES)
    assert room.look([]) == 0


def test_a_file_system_that_is_nearly_full_leaves_less_to_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = LogQuota(tmp_path, 1 << 30)
    old, new = tmp_path / "t1" / "1", tmp_path / "t2" / "1"
    for attempt in (old, new):
        written(attempt / "0.log", 8 * HEAD_BYTES)
    assert (room.make(), room.look([new])) == (0, 0)
    monkeypatch.setattr(log_quota, "nearly_full", lambda _: True)
    assert room.look([new]) >= 4 * HEAD_BYTES - log_quota.BLOCK
    assert taken(old / "0.log") >= 8 * HEAD_BYTES
    assert room.make() >= 4 * HEAD_BYTES - log_quota.BLOCK
    assert taken(old / "0.log") <= log_quota.TIGHT_BYTES
