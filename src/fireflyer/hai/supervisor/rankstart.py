"""Turns a forked process into a rank."""

import errno
import os
import signal

from fireflyer._native.hai import set_parent_death_signal
from fireflyer.hai.supervisor.messages import RankSpec


def become_rank(spec: RankSpec, parent: int) -> None:
    """Prepares the new process: it enters its cgroup, dies with `parent`, leads its own process group,
    writes to the rank's log and runs in the rank's folder.

    Raises:
        OSError: the cgroup, the log or the folder cannot be used; the caller exits with status 1.
    """
    for path in spec.entrances:
        entrance = os.open(path, os.O_WRONLY)
        os.write(entrance, b"0")
        os.close(entrance)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # `parent` died before the signal was set
        os._exit(1)
    os.setpgid(0, 0)
    null = os.open("/dev/null", os.O_RDONLY)
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    os.chdir(spec.cwd)


def exec_rank(spec: RankSpec, python: str) -> int:
    """Starts a rank as a fresh interpreter, a child of this process; returns its pid.

    Raises:
        OSError: the rank could not be started; no process is left.
    """
    parent = os.getpid()
    readable, writable = os.pipe()  # the pipe carries an error number; execve closes it
    pid = os.fork()
    if pid == 0:
        try:
            become_rank(spec, parent)
            os.execve(python, [python, "-u", spec.script, *spec.args], spec.env)
        except OSError as error:
            os.write(writable, str(error.errno).encode())
        except ValueError:  # a NUL in an argument
            os.write(writable, str(errno.EINVAL).encode())
        finally:
            os._exit(1)
    os.close(writable)
    with open(readable, "rb") as pipe:
        failure = pipe.read()
    if failure:
        os.waitid(os.P_PID, pid, os.WEXITED)
        number = int(failure)
        raise OSError(number, os.strerror(number))
    return pid
