"""Program that Slurm starts on each node of a job: announces the node's address, then executes the
supervisor and its guard.

    python -P -m fireflyer.hai.engines.slurm.node ATTEMPT_FOLDER    (srun runs one on each node)

The input is a file in the attempt's folder that only the file's owner can read; arguments and
environment contain no secret.
"""

import fcntl
import os
import socket
import sys
from pathlib import Path

import msgspec

from fireflyer.hai.supervisor.messages import Part
from fireflyer.hai.supervisor.parts import Announcement, announce, read_part


def main(arguments: list[str]) -> None:
    """Announces the node and executes the supervisor. Raises OSError or MsgspecError; the error's
    text goes to the job's output."""
    directory = Path(arguments[0])
    node = os.environ["SLURMD_NODENAME"]
    part: Part = read_part(directory, node)
    family = socket.getaddrinfo(part.address, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((part.address, 0), family=family, backlog=64)
    port = listener.getsockname()[1]
    log = directory.parent / f"{node}.supervisor.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    job = int(os.environ["SLURM_JOB_ID"])
    announce(directory.parent, node, Announcement(job=job, host=part.address, port=port))
    null = os.open("/dev/null", os.O_RDONLY)
    # A copy of the listener, with a number above those that the loop overwrites.
    bound = fcntl.fcntl(listener, fcntl.F_DUPFD, 10)
    for source, target in ((null, 0), (output, 1), (output, 2), (bound, 3)):
        os.dup2(source, target)
    os.close(bound)
    module = ["-P", "-m", "fireflyer.hai.supervisor", part.task, node, str(directory)]
    environment = {**os.environ, "FIREFLYER_TASK": part.task}
    os.execve(sys.executable, [sys.executable, *module], environment)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, msgspec.MsgspecError) as error:
        sys.exit(f"{os.environ.get('SLURMD_NODENAME')}: cannot start a supervisor: {error}")
