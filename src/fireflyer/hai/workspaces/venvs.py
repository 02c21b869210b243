"""Environments by lock file: one environment for each content of a lock file. The first task that
uses an environment creates it, and all tasks share it.

venvs/<id>.lock.txt    the lock file; <id> is its SHA-256
venvs/<key>/           the environment; <key> names the lock file and the interpreter
venvs/<key>.ready      marks a complete environment; written last
venvs/<key>.lock       locked (flock) by the process that creates the environment, and by its pip
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
    """Rejects a lock file that does not pin every package by hash. Only lines like `name==1.2
    --hash=sha256:...` are allowed, as `pip-compile --generate-hashes` and `uv export` write them.

    Raises:
        WorkspaceError: a line is rejected; the error names the line.
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
                f"the lock file has the option {words[0].split()[0]!a}: remove it, and set it for the "
                "server in pip's own configuration (e.g. PIP_INDEX_URL)"
            )
        if not _REQUIREMENT.match(words[0]):
            raise WorkspaceError(
                f"invalid line {line[:80]!a} in the lock file: expected `name==version` with hashes"
            )
        if len(words) < 2 or not all(map(_HASH.match, words[1:])):
            raise WorkspaceError(
                f"{words[0]!a} in the lock file has no hash, or an option other than a hash; write it with "
                "`pip-compile --generate-hashes` or `uv export --format requirements-txt`"
            )


class Venvs:
    """All environments of a home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, data: bytes) -> str:
        """Stores a lock file; returns its id.

        Raises:
            WorkspaceError: `check_lock` rejects the file.
            StorageError: the file cannot be written.
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
        """Marks an environment's lock file as used.

        Raises:
            WorkspaceError: the lock file is not stored.
        """
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise WorkspaceError(f"unknown environment {name!a}; give a lock file with --venv-lock")
        try:
            os.utime(self._lock_file(name))
        except FileNotFoundError:
            raise WorkspaceError(
                f"no lock file {name[:12]} here; give it again with `fireflyer run --venv-lock`"
            ) from None

    def _lock_file(self, name: str) -> Path:
        return self.folder / f"{name}.lock.txt"

    def python(self, name: str) -> Path:
        """Returns the path of the environment's interpreter, which exists once `make` has
        returned."""
        return self.folder / key(name) / "bin" / "python"

    async def make(self, name: str, log: Path) -> None:
        """Creates the environment unless it exists; waits if it is being created for another task.

        Cancelling this call kills the process that creates the environment.

        Args:
            name: id of a stored lock file.
            log: file to which pip's output is appended.

        Raises:
            WorkspaceError: the environment cannot be created; the log has the reason.
        """
        if (self.folder / f"{key(name)}.ready").exists():
            return
        command = [sys.executable, "-P", "-m", "fireflyer.hai.workspaces.venv_builder"]
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
                f"the environment of lock file {name[:12]} could not be made; the messages of pip are in "
                "the output of rank 0"
            )

    def prune(self, before: float, keep: Collection[str]) -> int:
        """Removes environments whose lock file was last used before this moment; returns the number
        of removed environments.

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
        """Removes an environment unless it is being created; returns whether it was removed."""
        lock = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.folder / f"{name}.ready").unlink(
                missing_ok=True
            )  # first, so that no incomplete environment is used
            shutil.rmtree(self.folder / name, ignore_errors=True)
            file.unlink()
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True


def key(name: str) -> str:
    """Returns the name of an environment: a hash of its lock file, interpreter and parent
    packages."""
    parts = (name, sys.version, sys.prefix, *parent_folders())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def parent_folders() -> list[str]:
    """Returns the folders with inherited packages, such as Fireflyer and torch. Packages of the
    lock file take precedence over inherited ones."""
    return [folder for folder in site.getsitepackages() if os.path.isdir(folder)]
