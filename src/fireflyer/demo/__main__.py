"""Runs `fireflyer demo` as `python -m fireflyer.demo`."""

import sys

_INTERRUPTED = "fireflyer: interrupted; every process of the demo has ended\n"


def main() -> int:
    """Runs the command.

    An interrupt, even during imports, prints one line and exits with code 130.
    """
    try:
        _leave_at_once_when_interrupted()
        from fireflyer.program import open_standard_streams

        open_standard_streams()
        from fireflyer.demo.command import run_line

        return run_line(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write(_INTERRUPTED)
        return 130


def _leave_at_once_when_interrupted() -> None:
    """Makes SIGINT end the process at once, until the run installs its own handlers.

    A KeyboardInterrupt is not enough, because an import could replace or swallow an exception.
    """
    import os
    import signal

    def leave(_number: int, _frame: object) -> None:
        os.write(2, _INTERRUPTED.encode())
        os._exit(130)

    signal.signal(signal.SIGINT, leave)


if __name__ == "__main__":
    sys.exit(main())
