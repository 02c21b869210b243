"""A real PostgreSQL in a folder, run by an unprivileged user, reached through TCP."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psycopg
from tests.plugins.guard import marked
from tests.ports import take_ports
from tests.waiting import LIMIT_S

USER = "fireflyer"


def folder_of_programs() -> Path | None:
    """Debian keeps initdb and postgres out of the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    there = shutil.which("initdb")
    return None if there is None else Path(there).parent


def missing() -> str:
    """Why there can be no PostgreSQL here; empty: there can."""
    if folder_of_programs() is None:
        return "no PostgreSQL (initdb): scripts/setup.sh --all-test-packages, as root on Debian"
    if os.geteuid() == 0 and _unprivileged() is None:
        return "PostgreSQL does not run as root, and there is no user nobody"
    return ""


def _unprivileged() -> pwd.struct_passwd | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("nobody")
    return None


class Postgres:
    """One server with one superuser, USER. Ended by `stop`; `kill` is SIGKILL to all of it.

    Args:
        root: an empty folder, in one that everybody may pass.
    """

    def __init__(self, root: Path) -> None:
        programs = folder_of_programs()
        assert programs is not None
        self._programs = programs
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._uid: int | None = None
        self._gid: int | None = None
        if os.geteuid() == 0:
            nobody = _unprivileged()
            assert nobody is not None
            self._uid, self._gid = nobody.pw_uid, nobody.pw_gid
            os.chown(root, nobody.pw_uid, -1)
        (self.port,) = take_ports(1)
        self._run(
            "initdb", "-D", str(root / "data"), "-U", USER, "--auth=trust", "--no-sync",
            "--encoding=UTF8", "--locale=C",
        )  # fmt: skip

    def url(self, name: str) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Returns once it answers."""
        options = {
            "port": self.port,
            "unix_socket_directories": "",
            "listen_addresses": "127.0.0.1",
            "fsync": "off",  # the machine does not die here
            "shared_buffers": "16MB",
            "max_connections": "60",
            "log_min_messages": "warning",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [str(self._programs / "postgres"), "-D", str(self._root / "data"), *words]
        with (self._root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._root,
                start_new_session=True, env={"LC_ALL": "C", **marked()}, user=self._uid, group=self._gid,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise TimeoutError((self._root / "log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def create(self, name: str, template: str = "template0") -> None:
        """Makes an empty database, or a copy of one that nobody uses."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')

    def require_passwords(self) -> None:
        """Of everybody but USER, from now on."""
        lines = [f"host all {USER} 127.0.0.1/32 trust", "host all all 127.0.0.1/32 scram-sha-256"]
        (self._root / "data" / "pg_hba.conf").write_text("\n".join(lines) + "\n")
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")

    def stop(self) -> None:
        """Ends it, whoever is connected."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to all of its processes, as by a crash."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)
        self._process.wait(LIMIT_S)
        self._process = None

    def _run(self, name: str, *words: str) -> None:
        done = subprocess.run(
            [self._programs / name, *words], capture_output=True, text=True, timeout=120,
            cwd=self._root, env={"LC_ALL": "C", "PATH": os.environ["PATH"]}, user=self._uid, group=self._gid,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
