"""Runs a script in a prepared process: `python -m fireflyer.haiprof.inside.run SCRIPT ARGS...`."""

import io
import os
import sys
from types import ModuleType

from fireflyer.haiprof.inside.prepare import prepare


def main(arguments: list[str]) -> None:
    """Runs the script as `__main__`, as `python SCRIPT` does."""
    prepare()
    script = arguments[0]
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    module = ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = module
    try:
        with io.open_code(script) as file:
            code = compile(file.read(), script, "exec", dont_inherit=True)
    except OSError as error:
        sys.exit(f"fireflyer: {script}: {error.strerror}")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
