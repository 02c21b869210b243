"""Program that creates one environment. The process dies with the server that started it:

    python -m fireflyer.hai.workspaces.venv_builder SERVER FOLDER LOCK_FILE PARENT_FOLDER...

Its output goes into the task's log.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

from fireflyer._native.hai import set_parent_death_signal
from fireflyer.hai.home import write_private
from fireflyer.hai.processes import orphans

MARK = "FIREFLYER_MAKING"
"""Environment variable of all processes that create an environment; the value is the environment's
folder."""

END_LIMIT_S = 60.0
"""Maximum wait in seconds for killed processes of an earlier builder to end. After this time the
attempt fails, so the limit must suffice on a busy machine."""


def main(arguments: list[str]) -> int:
    """Runs the program; returns the exit status, 0 if the environment can be used."""
    set_parent_death_signal(signal.SIGKILL)
    server, folder, lock_file, *parents = arguments
    if os.getppid() != int(server):
        return 1
    return make(Path(folder), Path(lock_file), parents)


def make(folder: Path, lock_file: Path, parents: list[str]) -> int:
    """Creates the environment in `folder` unless it is ready; returns 0, or 1 after a failure."""
    ready = folder.with_name(f"{folder.name}.ready")
    lock = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(lock, True)  # so that a pip that outlives this process keeps the lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say("the environment is being made for another task; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    if ready.exists():
        return 0
    # Kills processes of an earlier builder that outlived the builder and do not hold its lock.
    if left := orphans.end({MARK: str(folder)}, END_LIMIT_S):
        _say(f"processes {left} of an earlier attempt cannot be killed; run the task again")
        return 1
    os.environ[MARK] = str(folder)
    _say(f"making the environment of {lock_file.name[:12]}")
    if folder.exists():
        shutil.rmtree(folder)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    command = [
        str(python),
        "-I",
        "-m",
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        "--no-input",
    ]
    command += ["--disable-pip-version-check", "--no-color", "--progress-bar", "off"]
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() == parent:
                os.execv(python, [*command, "--requirement", str(lock_file)])
        finally:
            os._exit(127)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        _say(
            "the environment cannot be made: see above; correct the lock file and run the task again"
        )
        return 1
    # Runs after pip, because pip would take the parents' packages for packages of this environment.
    _inherit(folder, parents)
    os.sync()  # so that an environment marked as ready survives a power cut
    write_private(ready, b"")
    _say("the environment is ready")
    return 0


def _inherit(folder: Path, parents: list[str]) -> None:
    """Makes packages of the platform's own environment importable, with lower priority than
    packages of this environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"import site; site.addsitedir({parent!r})\n" for parent in parents]
    path = folder / "lib" / version / "site-packages" / "zz_fireflyer_parent.pth"
    path.write_text("".join(lines))


def _say(text: str) -> None:
    sys.stdout.write(f"fireflyer: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, subprocess.CalledProcessError) as error:
        _say(f"the environment cannot be made: {error}")
        sys.exit(1)
