"""Tables in a terminal: identifiers, names and states are whole; long text wraps, nothing is cut."""

import re
import time
from collections.abc import Callable
from random import Random

import pytest
from rich.cells import cell_len
from tests.draws import seeds

from fireflyer.bench.harness import report as bench
from fireflyer.cli import printing
from fireflyer.cli.accounts import impl as accounts
from fireflyer.cli.cluster import impl as cluster
from fireflyer.cli.ledger import impl as ledger
from fireflyer.cli.tables import INDENT, LEAST, WRAPPING, lay_out
from fireflyer.hai.ledger import Account, LedgerView
from fireflyer.hai.model import Event, NodeView, TaskLine, WindowView
from fireflyer.hai.model.identity import Group, TokenView, User

NAME = "a-name-of-forty-characters-as-sweeps-do1"
WORDS = [f"word-{number:02}" for number in range(20)]
REASON = " ".join(["rank 3 exited with 1:", *WORDS, "J" * 150])
"""Text that is longer than a line, with a word that is longer than a line."""


def task(id: str, name: str, reason: str = "") -> TaskLine:
    return TaskLine(id=id, name=name, state="failed", reason=reason, attempt=1, created=time.time())


def tasks() -> None:
    printing.tasks([task("t1", NAME, REASON), task("t123456", "other")])


def events() -> None:
    its = Event(
        seq=1, task="t1", attempt=1, kind="failed", detail={"reason": REASON}, monotonic_ns=0,
        wall=0.0,
    )  # fmt: skip
    printing.events([its], json=False)


def nodes() -> None:
    drained = NodeView(name="node-017.cluster.example", tasks=("t1",), state="drained",
                       reason=REASON, zone="zone-b", until=time.time() + 60)  # fmt: skip
    cluster.nodes([drained, NodeView(name="node-018.cluster.example")], json=False)


def windows() -> None:
    many = tuple(f"node-{number:03}" for number in range(40))
    its = WindowView(id="w1", nodes=many, begin=1.0, end=2.0, reason=REASON, user="u", group="g")
    cluster.windows([its], json=False)


def tokens() -> None:
    its = TokenView(
        id="k1", user="ada.lovelace", scope="operate", created=1.0, note=REASON, expires=None,
        revoked=None,
    )  # fmt: skip
    accounts.tokens([its], json=False)


def users() -> None:
    many = tuple(f"group-{number:03}" for number in range(40))
    accounts.users(
        [User(name="ada.lovelace", disabled=False, created=1.0, groups=many)], json=False
    )
    accounts.groups([Group(name="astronomers", created=1.0, members=many)], json=False)


def account() -> None:
    one = Account(whole=2 * 10**9, held=10**9, parts={"useful": 10**9, "queue": 10**9})
    view = LedgerView(unit="GPU", since=0, until=1, tasks={"t123456": one}, total=one)
    ledger._all(view, "GPU-hours")
    ledger._one("t123456", one, "GPU-hours")


WHOLE: list[tuple[Callable[[], None], list[str]]] = [
    (tasks, ["t1", NAME, "failed", "t123456", "other", REASON]),
    (events, ["t1", "failed", REASON]),
    (nodes, ["node-017.cluster.example", "drained", "node-018.cluster.example", "ready", REASON]),
    (windows, ["w1", "node-000 node-001", REASON]),
    (tokens, ["k1", "ada.lovelace", "operate", REASON]),
    (users, ["ada.lovelace", "astronomers", "group-000 group-001", "group-039"]),
    (account, ["t123456", "GOODPUT", "50.0 %"]),
]


@pytest.fixture(params=[20, 40, 60, 80, 120])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes standard output a terminal of so many columns."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


@pytest.mark.parametrize(("show", "whole"), WHOLE, ids=[show.__name__ for show, _ in WHOLE])
def test_nothing_is_cut_and_no_line_is_too_long(
    terminal: int, capsys: pytest.CaptureFixture[str], show: Callable[[], None], whole: list[str]
) -> None:
    show()
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in out
    table = out.partition("\n\n")[0].splitlines()
    assert not [line for line in table if len(line) > terminal and "  " in line.strip()], out
    assert max(map(len, table)) <= max(terminal, len(NAME)), out
    flat = " ".join(out.split())
    for text in whole:
        if text != REASON:
            assert text in flat
            continue
        assert out.count("J") == 150
        assert re.findall(r"word-\d\d", out) == WORDS


def test_a_bench_table_names_its_cases(terminal: int, capsys: pytest.CaptureFixture[str]) -> None:
    row = bench.Row.of_times("Q" * 70, "ms", [123456.0], "J" * 30, [1.0])
    machine = bench.Machine.here()
    bench.emit(
        bench.Report(bench="b", command="b", machine=machine, rows=[row]), json=False, output=None
    )
    out = capsys.readouterr().out
    assert "…" not in out
    assert (out.count("Q"), out.count("J")) == (70, 30)


@pytest.mark.parametrize("seed", seeds("tables", 200))
def test_layouts_keep_every_character_and_no_name_is_divided(seed: int) -> None:
    draw = Random(seed)
    heads = draw.sample(["TASK", "NAME", "STATE", "REASON", "NODES", "NOTE"], draw.randint(1, 6))

    def words(most: int) -> str:
        lengths = [draw.randint(1, 60) for _ in range(draw.randint(0, most))]
        return " ".join("".join(draw.choices("ab学é-", k=length)) for length in lengths)

    rows = [
        [words(9) if head in WRAPPING else words(1) for head in heads]
        for _ in range(draw.randint(0, 4))
    ]
    width = draw.randint(1, 200)
    _, lines = lay_out(heads, rows, width)
    for column, head in enumerate(heads):
        pieces = [text for line in lines for text, of in line if of == column]
        wanted = [row[column] for row in rows if row[column]]
        if head not in WRAPPING:
            names = [piece.replace(f"{head}  ", "").strip() for piece in pieces]
            assert [name for name in names if name] == wanted
        shown = "".join(pieces).replace(f"{head}  ", "")
        assert "".join(shown.split()) == "".join("".join(wanted).split())
    fixed = [cell for row in rows for cell, head in zip(row, heads, strict=True)
             if head not in WRAPPING]  # fmt: skip
    bound = max(width, LEAST, *map(cell_len, fixed), len(INDENT + "REASON  "), 0)
    assert max((cell_len("".join(text for text, _ in line)) for line in lines), default=0) <= bound
