"""The `fireflyer` command."""

import sys


def main() -> None:
    """Runs the command line and exits: 0 ok, 1 failure, 2 usage. Errors are one line on stderr."""
    try:
        from fireflyer.cli.app import run_line
    except KeyboardInterrupt:
        sys.stderr.write("fireflyer: interrupted\n")
        sys.exit(1)
    sys.exit(run_line(sys.argv[1:]))
