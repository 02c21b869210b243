"""`fireflyer prof`, also the program `haiprof`."""

import sys


def main() -> None:
    """Runs `haiprof`: the verbs of `fireflyer prof`, and `haiprof SCRIPT.py` for `haiprof run`."""
    try:
        from fireflyer.program import open_standard_streams

        open_standard_streams()  # before an import opens a file
        from fireflyer.cli.prof.commands import prof
        from fireflyer.cli.prof.original_form import original_form
        from fireflyer.program import run_app

        code = run_app(prof, "haiprof", original_form(sys.argv[1:]))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
