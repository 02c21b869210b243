"""The platform's folder: its files, its current server, and how to reach that server.

    $FIREFLYER_HOME/            mode 0700; default ~/.local/state/fireflyer
    ├── hai.sqlite              state, mode 0600
    ├── server.lock             locked by the server while it lives; holds its pid
    ├── start.lock              locked by a process that starts a server, until the server answers
    ├── server.json             pid, port and token file of the server
    ├── database.json           location of the PostgreSQL database, if set; replaces hai.sqlite
    ├── engine.json             engine of the tasks, if set; later servers use it, too
    ├── policy                  scheduling policy, if set; later servers use it, too
    ├── settings.json           other options of the last `up`; later servers use them, too
    ├── token                   bearer token, mode 0600
    ├── server.log              output of a background server
    ├── dashboard.html          link to the dashboard, made by `fireflyer dashboard --open`
    └── tasks/<id>/             output/, <attempt>/<rank>.log, <attempt>/haiprof/ (if profiled)

The locks are open-file-description locks: the kernel drops them with the process, and a query for
the holder does not take the lock. `server.json` is trusted only while `server.lock` is held, so a
stale file never sends the token to another process.

A server owns its home by the inode of `server.lock`. The server ends when the path no longer leads
to that inode, and never removes a file of another server.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from fireflyer.errors import ConfigError, Corrupted, PeerLost, StorageError
from fireflyer.program import user_directory

_FLOCK = "hhqqi0q"
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


class ServerFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of server.json."""

    pid: int
    port: int
    token_file: str


class EngineFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of engine.json: the engine that runs the tasks of a home."""

    engine: Literal["local", "slurm"] = "local"
    partition: str = ""
    """Slurm partition; empty: the cluster's default."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of settings.json: options of `fireflyer up` that later servers of the home use."""

    nodes: int | None = None
    """Virtual nodes of the local engine."""
    gpus: str | None = None
    """GPUs of this machine, e.g. "8:a100"; None: as the driver reports them."""
    port: int | None = None
    log_limit_mib: int | None = None


class Home:
    """Paths below the platform's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "hai.sqlite"
        self.lock = path / "server.lock"
        self.start_lock = path / "start.lock"
        self.server = path / "server.json"
        self.engine = path / "engine.json"
        self.database_file = path / "database.json"
        self.policy = path / "policy"
        self.settings = path / "settings.json"
        self.token = path / "token"
        self.log = path / "server.log"
        self.tasks = path / "tasks"

    def create(self) -> None:
        """Creates the folder, with mode 0700, if it is missing.

        Raises:
            ConfigError: the folder cannot be created or written to.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid == os.geteuid():
                self.path.chmod(0o700)
            self.tasks.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {self.path} as home: {error.strerror}; set FIREFLYER_HOME or --home"
            ) from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(f"home {self.path} is not writable; set FIREFLYER_HOME or --home")

    def served(self) -> bool:
        """Returns whether a server holds this home now."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"cannot use {self.path} as home: {error.strerror}") from None
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(descriptor)

    def take(self) -> int | None:
        """Takes the server's lock; returns the descriptor that holds the lock, None if another
        server holds it."""
        while True:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
            except (BlockingIOError, PermissionError):
                os.close(descriptor)
                return None
            if self.owned_by(descriptor):
                break
            os.close(descriptor)  # the home was replaced between open and lock
        os.pwrite(descriptor, b"%-20d\n" % os.getpid(), 0)
        self.server.unlink(missing_ok=True)
        for file in (self.server, self.token, self.engine, self.policy, self.settings):
            for partial in self.path.glob(f".{file.name}.*"):  # left by a killed server
                partial.unlink(missing_ok=True)
        return descriptor

    def owned_by(self, lock: int) -> bool:
        """Returns whether this descriptor belongs to the home's lock file.

        Returns False after the folder or the lock file was removed or replaced, because another
        server may then own the home and every file in it.
        """
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.lock))
        except OSError:
            return False

    def leave(self, lock: int) -> None:
        """Removes server.json if the home still belongs to the holder of this lock."""
        if self.owned_by(lock):
            self.server.unlink(missing_ok=True)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Holds the right to start a server; waits while another process is starting one."""
        descriptor = os.open(self.start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def holder(self) -> str:
        """Returns the process id of the last server that took the lock, as text for messages."""
        try:
            return self.lock.read_text().strip() or "unknown"
        except (OSError, UnicodeDecodeError):
            return "unknown"

    def read_server(self) -> ServerFile:
        """Returns the running server's entry in server.json.

        Raises:
            PeerLost: the server has not written the entry yet, or has removed it.
            Corrupted: the file is damaged.
        """
        try:
            return msgspec.json.decode(self.server.read_bytes(), type=ServerFile)
        except FileNotFoundError:
            raise PeerLost(
                f"the server (pid {self.holder()}) of {self.path} is starting or ending; try again soon"
            ) from None
        except OSError as error:
            raise Corrupted(
                f"cannot read {self.server}: {error.strerror}; end the server (pid {self.holder()}) "
                "and start it again"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupted(
                f"{self.server} is damaged ({error}); end the server (pid {self.holder()}) and start "
                "it again"
            ) from None

    def write_server(self, content: ServerFile) -> None:
        """Replaces server.json atomically."""
        write_private(self.server, msgspec.json.encode(content) + b"\n")

    def read_engine(self) -> EngineFile:
        """Returns the engine that runs the tasks; default: the local engine.

        Raises:
            Corrupted: the file is damaged.
        """
        try:
            return msgspec.json.decode(self.engine.read_bytes(), type=EngineFile)
        except FileNotFoundError:
            return EngineFile()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupted(
                f"cannot read {self.engine} ({error}); `fireflyer up --engine ...` writes it anew"
            ) from None

    def write_engine(self, content: EngineFile) -> None:
        """Replaces engine.json atomically."""
        write_private(self.engine, msgspec.json.encode(content) + b"\n")

    def read_policy(self) -> str | None:
        """Returns the scheduling policy that the last `up` set; None: none was set."""
        return self.policy.read_text().strip() if self.policy.exists() else None

    def read_token(self, path: Path) -> str:
        """Returns the bearer token.

        Raises:
            StorageError: the token file cannot be read.
        """
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"cannot read the token file {path}: {error}") from None


def locate(home: Path | None = None) -> Home:
    """Returns the home to use: the argument, else $FIREFLYER_HOME, else ~/.local/state/fireflyer.

    Raises:
        ConfigError: the path is not valid UTF-8, or the user has no home directory.
    """
    if home is None:
        named = os.environ.get("FIREFLYER_HOME")
        home = Path(named) if named else user_directory() / ".local" / "state" / "fireflyer"
    path = os.path.abspath(home)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"cannot use {path!a} as home: it is not valid UTF-8; set FIREFLYER_HOME or --home"
        ) from None
    return Home(Path(path))


def profile_folder(directory: str | Path, attempt: int) -> Path:
    """Returns the folder for a profile of an attempt, beside the attempt's logs. `directory`:
    folder of the task."""
    return Path(directory) / str(attempt) / "haiprof"


def write_private(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600 atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def _request(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
