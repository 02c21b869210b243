"""Text of users in tables is text: never markup, never a terminal's control codes."""

import msgspec
import pytest

from fireflyer.cli import printing
from fireflyer.cli.cluster.impl import nodes
from fireflyer.hai.controller.views import limits_in_words
from fireflyer.hai.model import Event, NodeView, TaskLine, TaskSpec, TaskView


def view(name: str, reason: str = "") -> TaskView:
    spec = TaskSpec(script="/x/s.py", args=("a\nb",), cwd="/x", name=name)
    return TaskView(
        id="t1", spec=spec, state="failed", reason=reason, attempt=1, generation=0,
        members=(), restarts=0, ranks=(),
        directory="/x", created=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("[/x[/]", "[/x[/]"),
        ("[red]x[/]", "[red]x[/]"),
        ("[/]", "[/]"),
        ("a\\[b]", "a\\[b]"),
        ("two\nlines", r"two\nlines"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\udcff", r"\xff"),
        ("\ud800", r"\ud800"),
        ("学习 é", "学习 é"),
    ],
)
def test_names_and_reasons_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], name: str, shown: str
) -> None:
    line = TaskLine(id="t1", name=name, state="failed", reason=name, created=0.0)
    printing.tasks([line])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].count(shown) == 2
    printing.task(view(name), json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"t1  {shown}")
    assert lines[2].endswith(r"/x/s.py a\nb")


def test_events_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    event = Event(
        seq=1, task="t1", attempt=1, kind="failed", detail={"reason": "[/x[/]\n\x1b["},
        monotonic_ns=0, wall=0.0,
    )  # fmt: skip
    printing.events([event, msgspec.structs.replace(event, seq=2)], json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == [r"[/x[/]\n\x1b["] * 2
    assert printing.event_line(event).endswith(r"[/x[/]\n\x1b[")


def test_limits_are_shown_with_what_does_not_hold_them(capsys: pytest.CaptureFixture[str]) -> None:
    unheld = "limits of cores are not enforced: /x has no controller cpu"
    spec = TaskSpec(script="/x/s.py", cwd="/x", memory_mib=2048, cpus=4)
    assert limits_in_words(spec, "") == "2GiB and 4 cores on each node"
    text = limits_in_words(msgspec.structs.replace(spec, cpus=0, memory_mib=1500), unheld)
    assert text == f"1500MiB on each node; {unheld}"
    assert limits_in_words(TaskSpec(script="/x/s.py", cwd="/x"), unheld) == ""
    printing.task(msgspec.structs.replace(view("x"), limits=text), json=False)
    assert f"limits     {text}\n" in capsys.readouterr().out
    nodes([NodeView(name=name, unheld=unheld) for name in ("n0", "n1")], json=False)
    assert capsys.readouterr().out.count(unheld) == 1


def test_the_members_are_shown_once_they_have_changed(capsys: pytest.CaptureFixture[str]) -> None:
    printing.task(view("x"), json=False)
    assert "members" not in capsys.readouterr().out
    printing.task(
        msgspec.structs.replace(view("x"), generation=2, members=("a:1", "b:2")), json=False
    )
    assert "members    generation 2: a:1, b:2\n" in capsys.readouterr().out
    detail = {"generation": 2, "members": ["a:1", "b:2"], "token": "x"}
    event = Event(
        seq=1, task="t1", attempt=1, kind="leased", detail=detail, monotonic_ns=0, wall=0.0
    )
    assert printing.details(event) == "generation 2: a:1, b:2"
