"""One command is enough for a user without rights in a fresh home: no daemon before, no root."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HELLO = """
import os
print("hello from", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "uid", os.getuid(), flush=True)
"""


class Nobody:
    """Runs programs as the user `nobody` with nothing but a home of his own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.entry = pwd.getpwnam("nobody")
        os.chown(home, self.entry.pw_uid, self.entry.pw_gid)
        self.environment = {"HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        self.environment["FIREFLYER_KERNEL_LOG"] = "off"

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, user=self.entry.pw_uid, group=self.entry.pw_gid, extra_groups=[], cwd=self.home,
            env=self.environment, capture_output=True, text=True, timeout=100, check=False, umask=0o022,
        )  # fmt: skip

    def fireflyer(self, *words: str) -> str:
        done = self.run(sys.executable, "-P", "-m", "fireflyer.cli", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes(self) -> set[int]:
        """Those with this home."""
        wanted = f"HOME={self.home}".encode()
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {int(name)} if wanted in environment else set()
        return found


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    home = Path(tempfile.mkdtemp(prefix="ffnobody"))
    try:
        found = Nobody(home)
        done = found.run(sys.executable, "-P", "-c", "import fireflyer._native")
        if done.returncode != 0:
            pytest.skip(f"the user nobody cannot read this installation: {done.stderr[-200:]}")
        yield found
        left = found.processes()
        assert not left
    finally:
        shutil.rmtree(home)


def test_one_command_from_nothing_to_a_finished_task(nobody: Any) -> None:
    script = nobody.home / "hello.py"
    script.write_text(HELLO)
    out = nobody.fireflyer("run", "-n", "2", "--all-ranks", "--start", "exec", str(script))
    uid = nobody.entry.pw_uid
    assert sorted(out.splitlines()) == [f"{n}| hello from {n} of 2 uid {uid}" for n in (0, 1)]
    (task,) = json.loads(nobody.fireflyer("ps", "--all", "--json"))
    assert (task["state"], task["user"]) == ("finished", "nobody")
    state = nobody.home / ".local/state/fireflyer"
    assert (state.stat().st_uid, state.stat().st_mode & 0o777) == (uid, 0o700)
    nobody.fireflyer("down")
