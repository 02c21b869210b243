"""The supervisor of one task on one node, and its guard.

    python -P -m fireflyer.hai.supervisor TASK NODE [ATTEMPT_FOLDER]
    python -P -m fireflyer.hai.supervisor TASK NODE --guards SUPERVISOR
    python -P -m fireflyer.hai.supervisor TASK NODE --guard GUARD --fork-server PID

Descriptor 3 is the listening socket; TASK and NODE only make `ps` readable. ATTEMPT_FOLDER is given
if the engine runs on another machine; the engine must then prove that it knows the secret in a file
of that folder. A zygote (`hai.forkserver.zygote`) uses the last two forms: the zygote forks the
processes, and each process executes this module with the process ids of the others. Descriptor 4 is
the socket to the fork server.

    guard ── supervisor ─┬─ fork server
                         ├─ rank ── processes that it starts
                         └─ rank ...

Guard and supervisor are subreapers and watch each other. When the supervisor dies, the guard adopts
the supervisor's descendants, kills all of them, and exits. When the guard dies, the supervisor
kills all descendants and exits. Only guard and supervisor have the listening socket open. A
connection that is refused, or closed without an answer, therefore proves that no process of the
task is left on the node.
"""

import os
import signal
import sys
from typing import NoReturn

from fireflyer._native.hai import set_child_subreaper
from fireflyer.hai.processes import kill_descendants
from fireflyer.hai.supervisor import FORK_SERVER, LISTENER


def main() -> None:
    """Runs the guard or the supervisor, if the arguments name one of them; otherwise forks and runs
    both."""
    node, *rest = sys.argv[2:]
    forks = rest[0:1] == ["--guard"]
    # Closes descriptors that the platform's server inherited and passed on to this process.
    os.closerange(FORK_SERVER + forks, 2**31 - 1)
    os.set_inheritable(LISTENER, False)
    if forks:
        os.set_inheritable(FORK_SERVER, False)
        supervise(int(rest[1]), node, fork_server=int(rest[3]))
    elif rest[0:1] == ["--guards"]:
        stand_guard(int(rest[1]))
    else:
        set_child_subreaper()
        guard = os.getpid()
        supervisor = os.fork()
        if supervisor == 0:
            os.setsid()  # so that a signal to a process group ends only guard or supervisor, not both
            set_child_subreaper()
            supervise(guard, node, rest[0] if rest else "")
        stand_guard(supervisor)


def supervise(guard: int, node: str, attempt: str = "", fork_server: int | None = None) -> NoReturn:
    """Runs the supervisor. The imports are here because the guard does not need them."""
    from fireflyer.hai.supervisor.supervise import Supervisor

    Supervisor(LISTENER, guard, node, attempt, fork_server).run()


def stand_guard(supervisor: int) -> NoReturn:
    """Waits for the end of the supervisor, then kills all descendants. Ignores SIGTERM, so that the
    guard can clean up after a signal to both processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.waitid(os.P_PID, supervisor, os.WEXITED)
    kill_descendants()
    # Exits without the interpreter's cleanup. While a process holds the listening socket, the
    # engine assumes that the task is alive.
    os._exit(0)


if __name__ == "__main__":
    main()
