"""`python -m fireflyer.demo` is `fireflyer demo`."""

import sys


def main() -> int:
    """Runs the command; an interrupt, even while modules are imported, is one line and exit code 1."""
    try:
        from fireflyer.demo.command import run_line

        return run_line(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("fireflyer: interrupted; every process of the demo has ended\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
