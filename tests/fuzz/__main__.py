"""Runs the targets under atheris with libFuzzer's arguments; the seeds go into the corpus, the last argument.

`python -m tests.fuzz [-max_total_time=60 ...] CORPUS`; a file instead of CORPUS: that input alone.
"""

import gc
import sys
from hashlib import sha256
from pathlib import Path
from types import FunctionType

import atheris  # type: ignore[import-untyped]  # in an environment of its own
from tests.fuzz.targets import run, seeds, whole


def main() -> None:
    place = Path(sys.argv[-1])
    if place.is_dir():
        for target, data in seeds():
            seed = whole(target, data)
            (place / sha256(seed).hexdigest()).write_bytes(seed)
    # Not atheris.instrument_imports, which does not see through the loader of an editable install.
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and str(thing.__module__).startswith("fireflyer."):
            atheris.instrument_func(thing)
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
