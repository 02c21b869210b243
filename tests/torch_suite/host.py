"""A forked process that runs torch's tests on request: pytest's own process stays as it is."""

import json
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import IO

from tests.torch_suite.ranks import Outcome, die_with


def _serve(requests: IO[str], replies: IO[str]) -> None:
    from tests.torch_suite.suite import Suite

    suite = Suite()
    for name in requests:
        print(json.dumps(suite.run(name.strip())), file=replies, flush=True)


class Host:
    """The process: imports torch's tests once, forks the ranks of every test, ends with its parent.

    Args:
        folder: a place for the tests' temporary files; some stay there if this process is killed.
    """

    def __init__(self, folder: Path) -> None:
        requests_read, requests_write = os.pipe()
        replies_read, replies_write = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                die_with(parent)
                os.close(requests_write)
                os.close(replies_read)
                # pytest's settings are no part of torch's tests.
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
                warnings.resetwarnings()
                tempfile.tempdir = str(folder)
                with os.fdopen(requests_read) as requests, os.fdopen(replies_write, "w") as replies:
                    _serve(requests, replies)
            finally:
                os._exit(0)
        os.close(requests_read)
        os.close(replies_write)
        self._requests = os.fdopen(requests_write, "w")
        self._replies = os.fdopen(replies_read)

    def run(self, name: str) -> Outcome:
        """Run one test on all ranks.

        Raises:
            EOFError: the process has ended.
        """
        print(name, file=self._requests, flush=True)
        reply = self._replies.readline()
        if not reply:
            raise EOFError(
                "the process that runs torch's tests has ended; its standard error says why"
            )
        kind, text = json.loads(reply)
        return Outcome(kind, text)

    def close(self) -> None:
        """End the process, and with it all ranks."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._requests.close()
        self._replies.close()
