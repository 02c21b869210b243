"""The supervisor of one task on one node, and its guard.

    python -P -m fireflyer.hai.supervisor TASK NODE [ATTEMPT_FOLDER]

Descriptor 3 is the listening socket; the names are for people who read `ps`. With a folder the engine is on
another machine: it has to prove the secret of the part that lies there.

    guard ── supervisor ─┬─ fork server
                         ├─ rank ── whatever it starts
                         └─ rank ...

Guard and supervisor are subreapers and watch each other. When the supervisor dies, whatever it supervised
becomes the guard's, which kills it to the last process before it goes. When the guard dies, the
supervisor does the same. The listening socket is open in both and nowhere else: who connects and is
refused or cut off without an answer knows that nothing of the task is left on the node.
"""

import os
import signal
import sys

from fireflyer._native.hai import set_child_subreaper
from fireflyer.hai.processes import kill_descendants


def main() -> None:
    """Is the guard; forks the supervisor, which imports what the guard never needs."""
    os.closerange(4, 2**31 - 1)  # what the server inherited from whoever started it
    os.set_inheritable(3, False)
    set_child_subreaper()
    guard = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        os.setsid()  # a signal to the guard's process group spares one of the two
        set_child_subreaper()
        from fireflyer.hai.engines.supervise import Supervisor

        Supervisor(3, guard, *sys.argv[2:4]).run()
    else:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # who signals both leaves one to see to the rest
        os.waitid(os.P_PID, supervisor, os.WEXITED)
        kill_descendants()
        os._exit(0)  # at once: our end of the listening socket says that something is left


if __name__ == "__main__":
    main()
