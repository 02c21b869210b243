"""The commands of README and of the pages for newcomers do what these pages show."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.docs import pages
from tests.waiting import LIMIT_S

from fireflyer.cli.app import app
from fireflyer.cli.passthrough import PASS_THROUGH

RUN = (
    "README.md",
    "docs/start/one-box.md",
    "docs/start/convert-ddp.md",
    "docs/tutorials/train.md",
    "docs/tutorials/data.md",
    "docs/tutorials/cluster.md",
)
"""Pages whose `bash` blocks are run; their other commands are in `ELSEWHERE`."""

ELSEWHERE = {
    "apt-get install": "needs root",
    "make setup": "the gate's first step",
    "make demo": "tests/demo/test_end_to_end.py",
    "make test": "the gate's last step",
    ". .venv/bin/activate": "the test's PATH has that folder",
    "torchrun --nproc-per-node 2 ddp.py": "torch alone, whose gloo thread may abort as Python ends",
    "mkdir /mnt/fs": "needs root: tests/fs3/mount",
    "fireflyer fs mount /mnt/fs": "needs root: tests/fs3/mount",
    "cp -r notes /mnt/fs": "needs root: tests/fs3/mount",
    "fireflyer fs umount /mnt/fs": "needs root: tests/fs3/mount",
}
"""Commands that no test of this folder runs, by their first words: who does, or why none does."""


def unrun(page: str) -> list[list[str]]:
    shown = (block for block in pages.blocks(page) if not block.title and block.kind in ("", "sh"))
    return [words for block in shown for words in pages.commands(block.text)]


def test_commands_that_are_not_run_have_a_reason() -> None:
    lines = {" ".join(words): page for page in RUN for words in unrun(page)}
    known = {line: start for line in lines for start in ELSEWHERE if line.startswith(start)}
    assert not lines.keys() - known.keys()
    assert not ELSEWHERE.keys() - known.values(), "listed, and on no page"


def test_command_lines_of_all_pages_have_verbs_and_options_of_the_program() -> None:
    group: Any = typer.main.get_command(app)
    found = ["README.md", *(str(path) for path in (pages.ROOT / "docs").rglob("*.md"))]
    lines = [line for page in found for line in pages.command_lines(page)]
    assert len(lines) > 100
    for line in lines:
        for words in pages.commands(line):
            if words[0] == "fireflyer":
                parse(group, words[1:])


def parse(command: Any, words: list[str]) -> None:
    """Raises a usage error for a verb or option that does not exist; runs nothing."""
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        parse(command.commands[words[0]], words[1:])
    elif command.context_settings != PASS_THROUGH:
        command.make_context("fireflyer", words)


def test_the_first_commands_of_the_tutorial_of_data(tmp_path: Path) -> None:
    page = "docs/tutorials/data.md"
    done = pages.run(page, tmp_path, most=1)
    assert done.code == 0, done.whole
    assert not pages.missing(page, done)


@pytest.mark.full
@pytest.mark.deadline(4 * LIMIT_S)
@pytest.mark.parametrize("page", RUN)
def test_a_page_as_a_reader_follows_it(page: str, tmp_path: Path) -> None:
    done = pages.run(page, tmp_path)
    assert done.code == 0, done.whole
    assert not pages.missing(page, done)


def test_messages_of_the_troubleshooting_page_are_in_the_source() -> None:
    joint = re.compile(r'"\s*\n\s*f?"')
    source = "".join(map(os.strerror, errno.errorcode)) + "".join(
        joint.sub("", path.read_text())
        for folder, kind in (("src", "*.py"), ("native", "*.cpp"))
        for path in (pages.ROOT / folder).rglob(kind)
    )
    rows = re.findall(
        r"^\| (`.*?) \|", (pages.ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    fragments = [
        part for row in rows for text in re.findall("`([^`]+)`", row) for part in text.split("...")
    ]
    assert len(fragments) > 50
    assert [part for part in fragments if part not in source] == []
