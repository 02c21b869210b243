"""Environments by lock file: one a content, made when a task first needs it, shared by all tasks.

venvs/<id>.lock.txt    the lock file; <id> is its SHA-256
venvs/<key>/           the environment; <key> names the lock file and the interpreter
venvs/<key>.ready      it may be used; written last, so one that is half made is never taken
venvs/<key>.lock       locked by whoever makes it (flock), pip included
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import site
import sys
from collections.abc import Collection
from pathlib import Path

from fireflyer.errors import StorageError, WorkspaceError
from fireflyer.hai.home import write_private

MAX_LOCK_BYTES = 4 << 20

_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]*\])?\s*===?\s*[^\s;]+(\s*;.*)?\Z"
)
_HASH = re.compile(r"--hash=[a-z0-9]+:[0-9a-f]{32,128}\Z")


def check_lock(data: bytes) -> None:
    """Refuses a lock file that does not say by hash what is installed: only lines as
    `name==1.2 --hash=sha256:...` may stand in it, as `pip-compile --generate-hashes` and `uv export` write.

    Raises:
        WorkspaceError: names the line.
    """
    if len(data) > MAX_LOCK_BYTES:
        raise WorkspaceError(f"the lock file has more than {MAX_LOCK_BYTES >> 20} MiB")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise WorkspaceError("the lock file is not valid UTF-8") from None
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        words = re.split(r"\s+(?=--)", line)
        if words[0].startswith("-"):
            raise WorkspaceError(
                f"the lock file has the option {words[0].split()[0]!a}: leave it out, and set it for the "
                "server in pip's own configuration (e.g. PIP_INDEX_URL)"
            )
        if not _REQUIREMENT.match(words[0]):
            raise WorkspaceError(
                f"the lock file has the line {line[:80]!a}, which is no `name==version` with hashes"
            )
        if len(words) < 2 or not all(map(_HASH.match, words[1:])):
            raise WorkspaceError(
                f"{words[0]!a} in the lock file has no hash, or another option; write the file with "
                "`pip-compile --generate-hashes` or `uv export --format requirements-txt`"
            )


class Venvs:
    """All environments of a home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, data: bytes) -> str:
        """Keeps a lock file; returns its id.

        Raises:
            WorkspaceError: `check_lock` refuses it.
            StorageError: it cannot be written.
        """
        check_lock(data)
        name = hashlib.sha256(data).hexdigest()
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path = self._lock_file(name)
            write_private(path, data)
        except OSError as error:
            raise StorageError(f"cannot write {error.filename}: {error.strerror}") from None
        return name

    def use(self, name: str) -> None:
        """Refuses an environment whose lock file is not here; notes that it is used.

        Raises:
            WorkspaceError: it is not.
        """
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise WorkspaceError(f"{name!a} is no environment; give a lock file with --venv-lock")
        try:
            os.utime(self._lock_file(name))
        except FileNotFoundError:
            raise WorkspaceError(
                f"no lock file {name[:12]} here; give it again with `fireflyer run --venv-lock`"
            ) from None

    def _lock_file(self, name: str) -> Path:
        return self.folder / f"{name}.lock.txt"

    def python(self, name: str) -> Path:
        """The interpreter of the environment, which is there once `make` has returned."""
        return self.folder / key(name) / "bin" / "python"

    async def make(self, name: str, log: Path) -> None:
        """Makes the environment unless it is there; waits while another task has it made.

        When this call is cancelled, the process that makes it is killed.

        Args:
            name: of a lock file that was taken.
            log: what pip says is appended to this file.

        Raises:
            WorkspaceError: it cannot be made; the log has the reason.
        """
        if (self.folder / f"{key(name)}.ready").exists():
            return
        command = [sys.executable, "-P", "-m", "fireflyer.hai.workspaces.making"]
        command += [str(os.getpid()), str(self.folder / key(name)), str(self._lock_file(name))]
        with log.open("ab") as output:
            maker = await asyncio.create_subprocess_exec(
                *command, *parent_folders(), stdin=asyncio.subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                status = await maker.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(maker.pid, signal.SIGKILL)
                await maker.wait()
        if status:
            raise WorkspaceError(
                f"the environment of lock file {name[:12]} could not be made; the output of rank 0 has "
                "what pip said"
            )

    def prune(self, before: float, keep: Collection[str]) -> int:
        """Removes environments whose lock file was used last before that time; returns how many.

        Args:
            before: seconds since 1970.
            keep: ids that stay in any case.
        """
        gone = 0
        for file in self.folder.glob("*.lock.txt"):
            name = file.name.removesuffix(".lock.txt")
            if name in keep or file.stat().st_mtime >= before:
                continue
            gone += self._remove(key(name), file)
        return gone

    def _remove(self, name: str, file: Path) -> bool:
        """Unless it is being made."""
        lock = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.folder / f"{name}.ready").unlink(missing_ok=True)  # first: it is never half there
            shutil.rmtree(self.folder / name, ignore_errors=True)
            file.unlink()
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True


def key(name: str) -> str:
    """Names an environment: its lock file, and the interpreter and packages that it stands on."""
    parts = (name, sys.version, sys.prefix, *parent_folders())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def parent_folders() -> list[str]:
    """The folders whose packages an environment has where its lock file names no others: Fireflyer is there,
    and torch."""
    return [folder for folder in site.getsitepackages() if os.path.isdir(folder)]
