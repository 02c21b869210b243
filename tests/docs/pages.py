"""Code blocks of documentation pages, and a shell that runs them as a reader would.

A block with a title is a file. Blocks of `bash` are commands, run in order by one shell. A block of
`text` shows some lines of what the commands before it print: digits stand for any number, `...` for
anything.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.waiting import LIMIT_S

from fireflyer.hai.client import Client

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_MARK = "@@ block"


class Block(NamedTuple):
    kind: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found.groups("")) for found in _BLOCK.finditer((ROOT / page).read_text())]


def command_lines(page: str) -> Iterator[str]:
    """Yields the lines of `fireflyer` in a page's blocks, without the prose that follows some."""
    for block in blocks(page):
        if block.kind in ("", "bash") and not block.title:
            for line in block.text.replace("\\\n", "").splitlines():
                command = re.split(r"\s{2,}", line)[0]
                if command.startswith("fireflyer ") and not command.endswith("..."):
                    yield command


def commands(text: str) -> Iterator[list[str]]:
    """Splits shell text into simple commands, without comments, redirections and control words."""
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()"):
                if words:
                    yield words[: words.index(">")] if ">" in words else words
                words = []
            elif words or word not in ("do", "done", "until", "for", "$"):
                words.append(word)


class Transcript:
    """Output of each block of commands, in order; `code` is the shell's exit status, -1: none came."""

    def __init__(self, output: str, code: int) -> None:
        parts = re.split(rf"^{_MARK}$\n", output, flags=re.MULTILINE)
        self.outputs, self.code, self.whole = parts[1:], code, output


def run(page: str, folder: Path, most: int | None = None) -> Transcript:
    """Runs the first `most` blocks of commands of a page in `folder`, then ends whatever they started."""
    lines, count = ["set -eu"], 0
    for block in blocks(page):
        if block.title:
            lines += [f"cat >{block.title} <<'END OF FILE'", block.text + "END OF FILE"]
        elif block.kind == "bash" and (most is None or count < most):
            lines += [f"echo '{_MARK}'", block.text]
            count += 1
    home = folder / "home"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FIREFLYER_FS")}
    environment["FIREFLYER_HOME"] = str(home)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with (
        (folder / "transcript").open("w+") as output,  # what the page starts may outlive the shell
        subprocess.Popen(
            ["bash", "-c", "\n".join(lines)], cwd=folder, env=environment,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        ) as shell,
    ):  # fmt: skip
        try:
            code = shell.wait(timeout=3 * LIMIT_S)  # many commands, some of them trainings
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            client = Client(home)
            if client.home.served():
                client.shutdown(keep=False)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
        output.seek(0)
        return Transcript(output.read(), code)


def missing(page: str, transcript: Transcript) -> list[str]:
    """Returns the lines that the page shows and its commands did not print."""
    absent, number = [], -1
    for block in blocks(page):
        if block.kind == "bash":
            number += 1
        elif block.kind == "text" and number < len(transcript.outputs):
            output = transcript.outputs[number]
            lines = block.text.splitlines()
            absent += [f"{line!r} in {output!r}" for line in lines if not _shows(line, output)]
    return absent


def _shows(line: str, output: str) -> bool:
    words = [re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(word)) for word in line.split()]
    pattern = r"\s*".join(".*" if word == r"\.\.\." else word for word in words)
    return re.search(pattern, output) is not None
