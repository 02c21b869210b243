"""The `fireflyer` command."""

import sys


def main() -> None:
    """Runs the command line and exits: 0 ok, 1 failure, 2 usage. Errors are one line on stderr.

    An interrupt before the command begins exits with 130 and prints nothing.
    """
    try:
        from fireflyer.program import open_standard_streams

        open_standard_streams()  # before an import opens a file
        from fireflyer.cli.app import run_line

        code = run_line(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
