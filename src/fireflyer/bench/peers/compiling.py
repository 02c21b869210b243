"""Compilation of peers that are C++ source files of Fireflyer."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fireflyer.errors import ConfigError


def compiled(source: Path, flags: tuple[str, ...]) -> Path:
    """Compiles a C++ file at the first use; returns the path of its program.

    The program stays in $XDG_CACHE_HOME/fireflyer (default ~/.cache/fireflyer).

    Raises:
        ConfigError: there is no C++ compiler, or the compilation fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise ConfigError(f"{source.stem} needs a C++ compiler: apt-get install g++")
    told = " ".join((compiler, *flags)).encode()
    key = hashlib.sha256(source.read_bytes() + told).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fireflyer"
    program = cache / f"{source.stem}-{key}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "program"
            command: list[str | Path] = [compiler, *flags, source, "-o", made]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ConfigError(f"{compiler} cannot compile {source}: {done.stderr[-400:]}")
            made.rename(program)
    return program
