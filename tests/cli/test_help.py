"""Help is there for every verb, and costs no heavy import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fireflyer
from fireflyer.cli.app import _only, app
from fireflyer.cli.help import THEMES

VERBS = [
    "up", "down", "run", "ps", "show", "logs", "events", "stop", "suspend", "resume", "why", "top",
    "nodes", "drain", "undrain", "dashboard", "faults", "ledger", "sim", "audit", "completion",
]  # fmt: skip
HANDED_OVER = {
    "demo": "fireflyer.demo",
    "bench": "fireflyer.bench",
    "plan": "fireflyer.haiscale.planner",
    "lab": "fireflyer.lab",
}
GROUPS = [
    "user", "group", "token", "quota", "window", "record", "ckpt", "fs", "config", "net", "validate",
    "failures", "prof", "kv", "experts", "workspace",
]  # fmt: skip
HEAVY = ["torch", "numpy", "fastapi", "uvicorn", "sqlalchemy", "rich", "asyncio"]

RUN_ALL = """
import contextlib, io, json, sys
from fireflyer.cli.app import run_line
texts = {}
for verb in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run_line([verb, "--help"] if verb else ["--help"])
    assert code == 0, (verb, code)
    texts[verb] = out.getvalue()
print(json.dumps({"texts": texts, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def helped() -> Any:
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_ALL, json.dumps(["", *VERBS])],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_help_of_every_verb_imports_nothing_heavy(helped: Any) -> None:
    assert [name for name in HEAVY if name in helped["modules"]] == []


def test_the_overview_imports_not_even_what_typer_parses_options_with() -> None:
    script = (
        "import sys; from fireflyer.cli.app import run_line; assert run_line(['--help']) == 0;"
        "assert not {'pydantic', 'msgspec', 'http'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_the_overview_names_every_verb_once_in_a_theme(helped: Any) -> None:
    panels = {title: verbs for title in THEMES for verbs in [_panel(helped["texts"][""], title)]}
    assert panels == {title: list(verbs) for title, verbs in THEMES.items()}
    assert sorted(verb for verbs in THEMES.values() for verb in verbs) == sorted(
        [*VERBS, *HANDED_OVER, *GROUPS]
    )


def _panel(text: str, title: str) -> list[str]:
    """Returns the first words of the lines below a title."""
    lines = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(helped: Any, verb: str) -> None:
    lines = helped["texts"][verb].splitlines()
    assert lines[0].startswith(f"Usage: fireflyer {verb} [OPTIONS]")
    options = lines[lines.index("Options:") + 1 :]
    for line, following in zip(options, [*options[1:], ""], strict=True):
        if line.strip().startswith("-"):
            explained = "  " in line.strip() or following.startswith(" " * 8)
            assert explained, line


@pytest.mark.parametrize("verb", [*VERBS, *GROUPS, *HANDED_OVER])
def test_only_the_verb_that_is_called_is_made(verb: str) -> None:
    one = _only(verb)
    assert len(one.registered_commands) + len(one.registered_groups) == 1
    assert one.info is app.info
    assert _only("nonsense") is _only("--version") is app


def test_an_interrupt_while_modules_are_imported_is_quiet() -> None:
    script = """
import sys
from pathlib import Path
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from fireflyer.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_no_arguments_show_the_overview(capsys: pytest.CaptureFixture[str], helped: Any) -> None:
    from fireflyer.cli.app import run_line

    assert run_line([]) == 0
    assert capsys.readouterr().out == helped["texts"][""]


@pytest.mark.parametrize("verb", HANDED_OVER)
@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["-h"], ["--json", "x", "--seconds", "20", "--", "-n", "2"]]
)
def test_programs_of_their_own_get_all_that_follows(
    monkeypatch: pytest.MonkeyPatch, verb: str, arguments: list[str]
) -> None:
    from fireflyer.cli import app, passthrough

    commands: list[list[str]] = []
    monkeypatch.setattr(passthrough, "_become", commands.append)
    assert app.run_line([verb, *arguments]) == 0
    assert commands == [[sys.executable, "-P", "-m", HANDED_OVER[verb], *arguments]]


def test_the_benchmark_of_the_file_system_is_among_its_verbs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fireflyer.cli import app, passthrough

    commands: list[list[str]] = []
    monkeypatch.setattr(passthrough, "_become", commands.append)
    assert app.run_line(["fs", "bench", "--quick", "--json"]) == 0
    assert commands == [[sys.executable, "-P", "-m", "fireflyer.bench", "fs", "--quick", "--json"]]


def test_the_version() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("fireflyer"), "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"fireflyer {fireflyer.__version__}\n"
