"""A server of the storm, as `fireflyer up` but without torch in its fork servers:

python -P -m tests.hai.soak.serving HOME NODES READY_FD
"""

import logging
import os
import sys
from pathlib import Path

import msgspec

from fireflyer import log
from fireflyer.hai.engines.local import LocalEngine
from fireflyer.hai.home import ServerFile, locate
from fireflyer.hai.server.process import Options, serve

LEASE_S = 1.0
"""Where the state is in PostgreSQL: what a server waits for one that was killed."""


def main() -> None:
    home, nodes, ready = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(ready, False)

    def tell(content: ServerFile) -> None:
        with os.fdopen(ready, "wb") as pipe:
            pipe.write(msgspec.json.encode(content))

    def engine(options: Options) -> LocalEngine:
        return LocalEngine(options.nodes, preload=())

    log.configure(logging.INFO)
    options = Options(home=locate(home), nodes=nodes, lease_s=LEASE_S, stand_by=lambda _: None)
    serve(options, tell, engine)


if __name__ == "__main__":
    main()
