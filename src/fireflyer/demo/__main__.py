"""`python -m fireflyer.demo` is `fireflyer demo`."""

import sys

_INTERRUPTED = "fireflyer: interrupted; every process of the demo has ended\n"


def main() -> int:
    """Runs the command; an interrupt, even while modules are imported, is one line and exit code 130."""
    try:
        _leave_at_once_when_interrupted()
        from fireflyer.demo.command import run_line

        return run_line(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write(_INTERRUPTED)
        return 130


def _leave_at_once_when_interrupted() -> None:
    """Until the run handles signals itself: an import would turn an exception into others, or swallow it."""
    import os
    import signal

    def leave(_number: int, _frame: object) -> None:
        os.write(2, _INTERRUPTED.encode())
        os._exit(130)

    signal.signal(signal.SIGINT, leave)


if __name__ == "__main__":
    sys.exit(main())
