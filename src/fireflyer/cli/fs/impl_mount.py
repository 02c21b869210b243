"""Implementation of `fireflyer fs mount` and `umount`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from fireflyer import log
from fireflyer.fs3.mount import program


def mount(
    where: str | None,
    directory: Path,
    *,
    foreground: bool,
    log_file: Path | None,
    cache_s: float,
    flags: int = 0,
) -> None:
    """Mounts a file system. Returns when the directory can be used; if `foreground`, when it is
    unmounted."""
    at = program.real(os.fspath(directory))
    program.check(at)

    def work(ready: Callable[[], None]) -> None:
        log.configure()
        program.serve(where, at, cache_s=cache_s, ready=ready, flags=flags)

    if foreground:
        work(lambda: _say(f"{at} is mounted; Ctrl-C unmounts it"))
        return
    log_file = log_file or program.default_log(at)
    program.detach(log_file, work)
    _say(f"{at} is mounted; log: {log_file}")


def umount(directory: str, *, lazy: bool) -> None:
    """Unmounts without a request to the mount, not even a stat, because its services may be gone."""
    path = os.path.abspath(directory)
    if program.mounted_at(path) is None:
        path = program.real(path)
    program.unmount(path, lazy=lazy)


def _say(text: str) -> None:
    sys.stdout.write(f"fireflyer: {text}\n")
    sys.stdout.flush()
