"""Program of `fireflyer run -m MODULE`: runs a module as `python -m MODULE ARGS` does. Stored tasks
contain the path of this file, so it must not move.

python run_module.py MODULE ARGS...        (in the task's working directory)
"""

import os
import runpy
import sys

if __name__ == "__main__":
    module = sys.argv[1]
    sys.path[0] = os.getcwd()  # instead of this file's folder
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
