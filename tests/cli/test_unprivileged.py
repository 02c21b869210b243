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

ROOT = Path(__file__).parents[2]

HELLO = """
import os
print("hello from", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "uid", os.getuid(), flush=True)
"""


IN_VIEW = """
number=0
for folder in $FOLDERS; do
    number=$((number + 1)); mkdir "$STAGE/$number"; mount --bind "$folder" "$STAGE/$number"
done
mount -t tmpfs -o mode=755 tmpfs "$HIDDEN"
number=0
for folder in $FOLDERS; do
    number=$((number + 1)); mkdir -p "$folder"; mount --bind "$STAGE/$number" "$folder"
done
exec "$@"
"""
"""Puts an empty folder over one that only root may enter, and back in it what is needed of it."""


class Nobody:
    """Runs programs as the user `nobody` with nothing but a home of his own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.entry = pwd.getpwnam("nobody")
        os.chown(home, self.entry.pw_uid, self.entry.pw_gid)
        self.environment = {"HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        self.environment["FIREFLYER_KERNEL_LOG"] = "off"

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """In a mount namespace of its own where the interpreter is in root's home."""
        needed = sorted({Path(sys.base_prefix), Path(sys.prefix), ROOT})
        hidden = [top for path in needed for top in path.parents if not top.stat().st_mode & 0o001]
        ids = [f"--reuid={self.entry.pw_uid}", f"--regid={self.entry.pw_gid}", "--clear-groups"]
        whole = ["setpriv", *ids, "--", *command]
        stage = Path(tempfile.mkdtemp(prefix="ffstage"))
        environment = {**self.environment, "STAGE": str(stage)}
        if hidden:
            top = min(hidden, key=lambda path: len(path.parts))
            inside = [str(path) for path in needed if path.is_relative_to(top)]
            environment |= {"HIDDEN": str(top), "FOLDERS": " ".join(inside)}
            unshare = ["unshare", "--mount", "--propagation", "private"]
            whole = [*unshare, "sh", "-ec", IN_VIEW, "sh", *whole]
        done = subprocess.run(
            whole, cwd=self.home, env=environment, capture_output=True, text=True, timeout=400, check=False,
            umask=0o022,
        )  # fmt: skip
        for folder in (*stage.iterdir(), stage):
            folder.rmdir()
        return done

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
