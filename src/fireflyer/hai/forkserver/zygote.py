"""The zygote: a process that has imported the slow modules and forks the fork servers of a user's
tasks.

    python -P -m fireflyer.hai.forkserver.zygote MODULE... TITLE_ROOM

    zygote ··fork··> guard ── supervisor ── fork server ── ranks

An engine has one zygote for each environment of tasks. For a task on a node the zygote forks three
processes, each a child of the one before. Guard and supervisor then execute their own small
program. The third is a fork server that shares all imported modules, so a second task with torch
starts as fast as a fork. The zygote exits with the engine, after IDLE_S without a task, or when a
file that it imported has changed. The engine then starts a new zygote.
"""

import fcntl
import os
import signal
import socket
import sys

import msgspec

from fireflyer._native.hai import (
    set_child_subreaper,
    set_parent_death_signal,
    set_process_title,
)
from fireflyer.hai.forkserver import preload, require_one_thread, run_script, serve, show
from fireflyer.hai.supervisor import FORK_SERVER, LISTENER
from fireflyer.hai.supervisor.messages import PRESENT, RankSpec, Tree

CONTROL = 3
"""Descriptor of the socket to the engine."""

READY = b"ready"

IDLE_S = 900.0

MESSAGE_BYTES = 1 << 18
"""Maximum size of a message."""

FORK_SERVER_MODULE = "fireflyer.hai.forkserver"
SUPERVISOR_MODULE = "fireflyer.hai.supervisor"


def main(arguments: list[str]) -> RankSpec | None:
    """Serves until the zygote exits (None); in a rank, returns the spec of that rank."""
    os.closerange(CONTROL + 1, 2**31 - 1)  # other inherited descriptors
    control = socket.socket(fileno=CONTROL)
    control.set_inheritable(False)
    preload(arguments[:-1])
    imported = _files()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards are reaped by the kernel
    decoder = msgspec.msgpack.Decoder(Tree)
    control.send(READY)
    control.settimeout(IDLE_S)
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
        except TimeoutError:
            return None
        if not data or imported != _files():
            return None
        if data == PRESENT:
            control.send(READY)
            continue
        require_one_thread()
        guard = os.fork()
        if guard == 0:
            control.close()
            return _become_tree(decoder.decode(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(guard).encode())


def _files() -> dict[str, tuple[int, int]]:
    """Returns the time and size of each imported file, to detect changes."""
    found: dict[str, tuple[int, int]] = {}
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path:
            try:
                status = os.stat(path)
            except OSError:
                continue
            found[path] = (status.st_mtime_ns, status.st_size)
    return found


def _become_tree(tree: Tree, descriptors: list[int]) -> RankSpec | None:
    """Turns the forked process into the guard, which forks supervisor and fork server. Returns only
    in the fork server and in ranks."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        set_child_subreaper()
        ours, theirs = socket.socketpair()
        # Copies of the descriptors, with numbers above those that the code below overwrites.
        null, log, listener, ours_high = (
            fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
            for descriptor in (*descriptors, ours.fileno())
        )
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        guard = os.getpid()
        supervisor = os.fork()
        if supervisor:
            os.dup2(listener, LISTENER)
            _execute(tree, ["--guards", str(supervisor)])
        os.setsid()  # so that a signal to a process group ends only guard or supervisor, not both
        set_child_subreaper()
        parent = os.getpid()
        server = os.fork()
        if server:
            os.dup2(listener, LISTENER)
            os.dup2(ours_high, FORK_SERVER)
            _execute(tree, ["--guard", str(guard), "--fork-server", str(server)])
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        ours.close()
        for descriptor in (null, log, listener, ours_high, *descriptors):
            os.close(descriptor)
        name = [sys.executable, "-P", "-m", FORK_SERVER_MODULE, str(theirs.fileno())]
        set_process_title(show(name), show([f"{key}={value}" for key, value in tree.marks.items()]))
    except OSError as error:
        os.write(2, f"zygote: cannot fork for {tree.task}: {error}\n".encode())
        os._exit(1)
    return serve(theirs)


def _execute(tree: Tree, how: list[str]) -> None:
    command = [tree.python, "-P", "-m", SUPERVISOR_MODULE, tree.task, tree.node, *how]
    os.execve(tree.python, command, tree.env)


if __name__ == "__main__":
    rank = main(sys.argv[1:])
    if rank is not None:
        run_script(rank)
