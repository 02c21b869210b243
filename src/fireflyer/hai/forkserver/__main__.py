"""Program of the fork server: see `fireflyer.hai.forkserver`."""

import sys

from fireflyer.hai.forkserver import main, run_script

if __name__ == "__main__":
    rank = main(sys.argv[1:])
    if rank is not None:
        run_script(rank)
