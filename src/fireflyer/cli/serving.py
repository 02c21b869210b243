"""`fireflyer up`."""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from fireflyer import log
from fireflyer.hai.home import ServerFile, locate
from fireflyer.hai.server import Options
from fireflyer.hai.server import serve as serve_home


def serve(home: Path | None, nodes: int, port: int, keep: bool) -> None:
    """Serves in the foreground; says so on stderr once requests are answered."""
    where = locate(home)
    where.create()
    log.configure(logging.INFO)
    with ExitStack() as starting:
        starting.enter_context(where.starting())

        def ready(server: ServerFile) -> None:
            starting.close()
            sys.stderr.write(
                f"fireflyer: serving {where.path} on port {server.port}, nodes: {nodes}; Ctrl-C ends\n"
            )
            sys.stderr.flush()

        serve_home(Options(home=where, nodes=nodes, port=port, keep=keep), ready)
