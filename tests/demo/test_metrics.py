"""Metrics lines are read whole, once and in order, whatever a killed writer left."""

from pathlib import Path

import msgspec
import pytest

from fireflyer.demo.metrics import MetricsRecord, Tail


def encoded(step: int) -> bytes:
    line = MetricsRecord(
        step=step,
        loss=1.5,
        tokens=2048,
        step_s=0.1,
        comm_s=0.01,
        monotonic=5.0,
        wall=6.0,
        trained_s=0.1 * step,
        attempt=1,
        checkpoint_step=None,
        checkpoint_stall_s=None,
    )
    return msgspec.json.encode(line) + b"\n"


def test_a_file_that_does_not_exist_yet_has_no_lines(tmp_path: Path) -> None:
    assert Tail(tmp_path / "metrics.jsonl").read() == []


@pytest.mark.parametrize("piece", [1, 7, 100, 10_000])
def test_lines_that_arrive_in_pieces_come_out_whole(tmp_path: Path, piece: int) -> None:
    data = b"".join(encoded(step) for step in range(1, 6))
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    seen = []
    for start in range(0, len(data), piece):
        with path.open("ab") as file:
            file.write(data[start : start + piece])
        seen += [line.step for line in tail.read()]
    assert seen == [1, 2, 3, 4, 5]
    assert tail.damaged == 0


def test_what_a_killed_writer_left_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    torn = encoded(2)[:30]
    path.write_bytes(encoded(1) + torn + encoded(3) + b"\xff\xfe\n{}\n" + encoded(4))
    tail = Tail(path)
    assert [line.step for line in tail.read()] == [1, 4]
    assert tail.damaged == 3
