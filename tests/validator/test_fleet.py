"""`fireflyer validate fleet`: what it reads, prints and rejects."""

import json
import math
from pathlib import Path

import pytest
from tests.validator.fleets import Samples, fleet

from fireflyer.cli.app import run_line
from fireflyer.validator import fleet as fleets


def written(path: Path, **checks: tuple[Samples, str]) -> str:
    lines = ["node,check,value,better"]
    for check, (samples, better) in checks.items():
        lines += [f"{n},{check},{v!r},{better}" for n, values in samples.items() for v in values]
    path.write_text("\n".join(lines).replace("np.float64(", "").replace(")", "") + "\n")
    return str(path)


def test_defective_nodes_with_their_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, bad = fleet(1, nodes=40, least=0.09)
    slow, _ = fleet(2, nodes=40, share=0)
    slow["n5"] = [1.5 * value for value in slow["n5"]]
    path = written(tmp_path / "f.csv", gemm=(fast, "more"), latency=(slow, "less"))
    assert run_line(["validate", "fleet", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(one["node"], one["check"]) for one in found["defective"]} == {
        ("n5", "latency"), *((node, "gemm") for node in bad),
    }  # fmt: skip
    assert all(set(one) == {"node", "check", "similarity"} for one in found["defective"])
    similarities = [one["similarity"] for one in found["defective"]]
    assert similarities == sorted(similarities)
    assert [one["check"] for one in found["checks"]] == ["gemm", "latency"]
    assert {"node": "n5", "check": "latency"} in found["fixed"]
    assert run_line(["validate", "fleet", path]) == 0
    shown = capsys.readouterr().out
    assert "n5" in shown
    assert "CRITERION" in shown


def rounds(path: Path, bad: dict[str, str]) -> str:
    """Writes rounds of 8 nodes, of which the named one lost a third."""
    lines = ["round,node,check,value,better"]
    for of_round, slow in bad.items():
        for node, values in fleet(3, nodes=8, share=0)[0].items():
            share = 2 / 3 if node == slow else 1.0
            lines += [f"{of_round},{node},disk write,{share * value},more" for value in values]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"a": "n5", "b": "n5"}, ["n5"]),
        ({"a": "n5", "b": "n6"}, []),
        ({"a": "n5", "b": ""}, []),
        ({"a": "n5", "b": "", "c": "n5"}, ["n5"]),
        ({"a": "n5"}, ["n5"]),
    ],
)
def test_of_several_rounds_two_must_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: dict[str, str], named: list[str]
) -> None:
    path = rounds(tmp_path / "f.csv", bad)
    assert run_line(["validate", "fleet", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["node"] for one in found["defective"]] == named
    assert found["checks"][0]["defective"] == len(named)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1e100, -1e100, 1e100, 1e100], ""),
        ([1e-300, 1e-300, 1e100, 1e-300], "the criterion's median is 0"),
        ([5e-324, 0.0, 5e-324, -1e100], "the criterion's median is 0"),
    ],
)
def test_values_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: list[float], reason: str
) -> None:
    """Nothing overflows: a warning would be an error here."""
    path = written(tmp_path / "f.csv", c=({f"n{at}": [v] for at, v in enumerate(values)}, "more"))
    assert run_line(["validate", "fleet", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checks"][0]["reason"].startswith(reason)
    assert [one["node"] for one in found["defective"]] == ([] if reason else ["n1"])
    assert all(math.isfinite(one["similarity"]) for one in found["defective"])


def test_rounds_are_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.csv"
    line = ["validate", "--check", "clock", "--check", "kernel log", "--csv", str(path)]
    for name in (["--round", "1"], ["--round", "2"], []):
        run_line([*line, "--node", "n1", *name])
    found = fleets.read(path)
    assert found
    assert all(list(of_check.rounds) == ["1", "2", ""] for of_check in found.values())
    path.write_text("node,check,value,better\n")
    capsys.readouterr()
    assert run_line([*line, "--round", "1"]) == 1
    assert "expected the columns node,check,value,better,round" in capsys.readouterr().err


def test_two_nodes_have_no_criterion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "f.csv", gemm=({"a": [1.0], "b": [9.0]}, "more"))
    assert run_line(["validate", "fleet", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["defective"] == []
    assert found["checks"][0]["criterion"] is None
    assert "2 nodes: no criterion" in found["checks"][0]["reason"]
    assert run_line(["validate", "fleet", path]) == 0
    assert "no criterion" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'node'"),
        ("node,check,value\na,b,1\n", "no column 'better'"),
        ("node,check,value,better\n", "no measurement"),
        ("node,check,value,better\na,b,fast,more\n", "line 2: invalid value 'fast'"),
        ("node,check,value,better\na,b,nan,more\n", "line 2: invalid value 'nan'"),
        ("node,check,value,better\na,b,1e999,more\n", "line 2: invalid value"),
        ("node,check,value,better\na,b,-2e100,more\n", "at most 1e+100 in size"),
        ("node,check,value,better\na,b,1,more,x\n", "line 2: the row has more fields"),
        ("node,check,value,better,node\na,b,1,more,x\n", "two columns 'node'"),
        ("round,node,check,value,better,round\n1,a,b,1,more,1\n", "two columns 'round'"),
        ("node,check,value,better\na,b,1,bigger\n", "line 2: invalid better 'bigger'"),
        ("node,check,value,better\n,b,1,more\n", "line 2: the row has no node"),
        ("node,check,value,better\na,,1,more\n", "line 2: the row has no check"),
        ("node,check,value,better\na,b\n", "line 2: invalid better ''"),
        ("node,check,value,better\na,b,1,more\nc,b,1,less\n", "line 3: check 'b' is better with"),
    ],
)
def test_bad_files_name_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "f.csv"
    path.write_text(text)
    assert run_line(["validate", "fleet", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("data", [None, b"\xff\xfe\x00n"])
def test_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes | None
) -> None:
    path = tmp_path / "f.csv"
    if data is not None:
        path.write_bytes(data)
    assert run_line(["validate", "fleet", str(path)]) == 1
    assert "cannot read" in capsys.readouterr().err
