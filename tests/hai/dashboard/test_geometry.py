"""Drawings, texts and the ends of logs, from values alone."""

from pathlib import Path

import pytest

from fireflyer.hai.controller.logs import LogFile
from fireflyer.hai.dashboard import tail, text_filters
from fireflyer.hai.dashboard.charts import cluster_map
from fireflyer.hai.dashboard.charts.timeline import ATTEMPTS, MOST_BARS, timeline
from fireflyer.hai.dashboard.event_text import event_pieces
from fireflyer.hai.ledger import segments
from fireflyer.hai.model import Event, NodeView, TaskSpec


def history(attempts: int, each_s: float = 10.0) -> list[Event]:
    """A task that is suspended and resumed so often, and runs again."""
    found: list[Event] = []
    at = 1_700_000_000.0

    def put(kind: str, attempt: int, seconds: float = 0.0, **detail: object) -> None:
        nonlocal at
        at += seconds
        found.append(
            Event(
                seq=len(found) + 1, task="t1", attempt=attempt, kind=kind, detail=detail,
                monotonic_ns=0, wall=at,
            )
        )  # fmt: skip

    put("submitted", 0)
    put("queued", 0)
    for attempt in range(1, attempts + 1):
        put("starting", attempt, each_s, nodes=["n0", "n1"])
        put("running", attempt, each_s)
        put("suspending", attempt, each_s, preempted=attempt % 2 == 0)
        put("gang_ended", attempt, each_s, outcome="suspended", reason="as asked for")
        put("suspended", attempt)
        put("resumed", attempt, each_s)
        put("queued", attempt)
    put("starting", attempts + 1, each_s, nodes=["n1"])
    put("running", attempts + 1, each_s)
    return found


def test_a_timeline_has_no_gaps_and_an_attempt_for_each_start() -> None:
    events = history(2)
    now = events[-1].wall + 30
    line = timeline(events, segments(events, now), now)
    assert line is not None
    assert line.bars[0].x == 0
    for bar, following in zip(line.bars, line.bars[1:], strict=False):
        assert bar.x + bar.width == pytest.approx(following.x, abs=0.02)
    assert line.bars[-1].x + line.bars[-1].width == pytest.approx(100, abs=0.02)
    assert [run.number for run in line.runs] == [3, 2, 1]
    assert [(run.outcome, run.end is None) for run in line.runs] == [
        ("runs", True), ("suspended", False), ("suspended", False),
    ]  # fmt: skip
    assert [[bar.cause for bar in run.bars] for run in line.runs] == [
        ["starting", "useful"], ["starting", "useful", "suspended"], ["starting", "useful", "suspended"],
    ]  # fmt: skip
    assert [mark.title for mark in line.marks] == [
        "suspend requested", "resumed", "preempted for other tasks", "resumed",
    ]  # fmt: skip
    assert set(line.causes) == {"queue", "starting", "useful", "suspended"}
    assert all(0 < x <= 100 for x, _ in line.ticks)


def test_a_long_history_is_a_bounded_drawing() -> None:
    events = history(2000)
    now = events[-1].wall + 10
    found = segments(events, now)
    line = timeline(events, found, now)
    assert line is not None
    assert len(found) > 8000
    assert MOST_BARS - 1 <= len(line.bars) <= MOST_BARS + 1
    assert (len(line.runs), line.left_out) == (ATTEMPTS, 2001 - ATTEMPTS)
    assert line.runs[0].number == 2001
    assert [bar.cause for bar in line.runs[1].bars] == ["starting", "useful", "suspended"]


def test_nothing_happened_is_no_timeline() -> None:
    assert timeline([], [], 0.0) is None
    (submitted, *_) = history(1)
    assert timeline([submitted], [], submitted.wall) is not None


def test_the_map_is_zones_leaves_and_cells_in_order() -> None:
    nodes = [
        NodeView(name=f"n{i}", gpus=8, free=8, leaf=f"leaf{i % 2}", zone=f"z{i % 4 // 2}")
        for i in (10, 2, 1, 0, 3, 11)
    ]
    nodes.append(
        NodeView(name="d", state="drained", gpus=8, free=2, tasks=("t1",), leaf="leaf0", zone="z0")
    )
    nodes.append(NodeView(name="p", gpus=8, free=2, tasks=("t2", "t3"), leaf="leaf0", zone="z0"))
    nodes.append(NodeView(name="w", tasks=("t4",), leaf="leaf0", zone="z0"))
    zones = cluster_map.zones(nodes, {"t3"})
    assert [(zone.name, [leaf.name for leaf in zone.leaves]) for zone in zones] == [
        ("z0", ["leaf0", "leaf1"]), ("z1", ["leaf0", "leaf1"]),
    ]  # fmt: skip
    first = {cell.name: cell for cell in zones[0].leaves[0].cells}
    assert list(first) == ["d", "n0", "p", "w"]
    assert [(c.state, c.letter, c.fill, c.own) for c in first.values()] == [
        ("drained", "D", 20, False), ("free", "", 0, False), ("partly", "", 20, True),
        ("full", "", 26, False),
    ]  # fmt: skip
    assert [cell.name for cell in zones[1].leaves[0].cells] == ["n2", "n10"]
    (only,) = cluster_map.zones(nodes, set(), "leaf1")[1].leaves
    assert [cell.name for cell in only.cells] == ["n3", "n11"]


def test_more_nodes_than_can_be_drawn_are_sums() -> None:
    nodes = [NodeView(name=f"n{i}", leaf=f"l{i // 40}") for i in range(cluster_map.MOST_CELLS + 40)]
    (zone,) = cluster_map.zones(nodes, set())
    assert all(leaf.cells == () for leaf in zone.leaves)
    assert sum(leaf.counts["free"] for leaf in zone.leaves) == len(nodes)
    (zone,) = cluster_map.zones(nodes, set(), "l3")
    assert [len(leaf.cells) for leaf in zone.leaves] == [40]


@pytest.mark.parametrize("text", ["", "a\n", "one\ntwo", "ä€𐍈\nx", "no end of line " * 10])
@pytest.mark.parametrize("most", [5, 9, 64, 4096])
def test_the_end_of_a_log_is_whole_lines_and_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, most: int
) -> None:
    monkeypatch.setattr(tail, "BYTES", most)
    data = text.encode()
    path = tmp_path / "0.log"
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        found = tail.read(LogFile("t1", 1, path), 0)
        shown = found.text.encode()
        assert data[: found.next].endswith(shown)
        assert size - found.next < 4
        assert data[found.next : size] == b"" or data[found.next] >= 0xC0
        assert found.cut == (size > most)
        if not found.cut:
            assert shown == data[: found.next]


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    found = tail.read(LogFile("t1", 3, tmp_path / "0.log"), 0)
    assert (found.text, found.next, found.size, found.attempt) == ("", 0, 0, 3)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\", "xlink"),
        ("\x1b(Bx\x1b=y\x1bMz", "xyz"),
        ("a\rb\n\r\n1\r2\r", "b\n\n2"),
        ("\x00\x07\x08a\tb\x7f\u202e", "a\tb"),
        ("<b>&amp;", "<b>&amp;"),
        ("\x1b", ""),
        ("\x1b[31", ""),
        ("\x1b[31\nb", "\nb"),
        ("\x1b]0;title\nb\nc", "\nb\nc"),
        ("\x1b]0;title\r\nb", "\nb"),
        *((f"a\x1b{begin}title\nb\x1b{begin}x\x1b\\c\n", "a\nbc\n") for begin in "PX_^"),
    ],
)
def test_what_steers_a_terminal_is_left_out(text: str, shown: str) -> None:
    assert text_filters.log_text(text) == shown


def test_words() -> None:
    spans = {
        0: "0.0 s",
        59.6: "60 s",
        60: "1 min",
        125: "2 min 5 s",
        7500: "2 h 5 min",
        90_000: "1 d 1 h",
    }
    assert {seconds: text_filters.span(seconds) for seconds in spans} == spans
    assert text_filters.span(-5) == "0.0 s"
    assert text_filters.short("a\n\x1b\u202eb") == "a\\n\\x1b\\u202eb"
    assert text_filters.short("x" * 10_000) == "x" * 59 + "…"
    assert text_filters.percent(1, 0) == "0 %"
    assert text_filters.percent(9995, 10_000) == "100 %"
    assert text_filters.percent(1, 10_000) == "< 0.1 %"
    assert text_filters.clock(0) == "1970-01-01 00:00:00 UTC"
    assert text_filters.title(TaskSpec(script="/a/train.py", cwd="/")) == "train.py"


EXITED = {"rank": 1, "node": "n0", "code": 7, "signal": None, "suspended": False}
BEAT = {"first": 1000.25, "last": 2000, "step": -1, "saved": 0.0, "saved_step": -1}


@pytest.mark.parametrize(
    ("kind", "detail", "line"),
    [
        ("progress", BEAT, ["first heartbeat ", 1000.25, ", last ", 2000.0]),
        (
            "progress", {**BEAT, "step": 0, "saved": 1500.5, "saved_step": 0},
            ["first heartbeat ", 1000.25, ", last ", 2000.0, ", step 0", ", saved ", 1500.5, " at step 0"],
        ),
        ("submitted", {}, []),
        ("running", {}, []),
        ("suspending", {"reason": "room for t2", "preempted": True}, ["room for t2"]),
        ("starting", {"nodes": ["n0", "n1"]}, ["on n0, n1"]),
        ("rank_started", {"rank": 1, "node": "n0", "pid": 9}, ["rank 1 on n0, pid 9"]),
        ("rank_joined", {"rank": 1, "node": "n0", "incarnation": 2}, ["rank 1 on n0 (newcomer 2)"]),
        ("rank_exited", EXITED, ["rank 1 on n0: exit 7"]),
        ("rank_exited", {**EXITED, "suspended": True, "code": 0}, ["rank 1 on n0: suspended"]),
        (
            "rank_exited", {**EXITED, "code": None, "signal": 9, "lost": True},
            ["rank 1 on n0: signal 9; the other ranks continue"],
        ),
        (
            "rank_exited", {**EXITED, "code": None, "lost": True},
            ["rank 1 on n0: lost with its node; the other ranks continue"],
        ),
        ("leased", {"generation": 2, "members": ["a", "b"], "token": "x"}, ["generation 2: a, b"]),
        ("gang_ended", {"outcome": "finished", "reason": ""}, ["finished"]),
        ("gang_ended", {"outcome": "failed", "reason": "exit 1"}, ["failed: exit 1"]),
        (
            "restarting",
            {"reason": "exit 1", "restarts": 1, "max_restarts": 3, "node_faults": 0, "avoid": []},
            ["1 of 3: exit 1"],
        ),
        (
            "restarting",
            {"reason": "hung", "restarts": 0, "max_restarts": 3, "node_faults": 2, "avoid": ["n1"]},
            ["0 of 3, 2 by nodes, avoids n1: hung"],
        ),
        ("observed", {"what": "oom", "node": "", "wall": 1.0, "text": "out of memory"}, ["out of memory"]),
        (
            "acted",
            {"action": "restart", "rule": "oom", "cause": "script", "why": "", "end": False, "node": "n0"},
            ["n0: restart (rule oom)"],
        ),
    ],
)  # fmt: skip
def test_what_an_event_says(kind: str, detail: dict[str, object], line: list[object]) -> None:
    event = Event(
        seq=1, task="t1", attempt=1, kind=kind, detail=detail, monotonic_ns=0, wall=0.0
    )  # fmt: skip
    assert event_pieces(event) == line
    assert [type(part) for part in event_pieces(event)] == [type(part) for part in line]
