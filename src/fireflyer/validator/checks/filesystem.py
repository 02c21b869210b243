"""fs3: write a file, read it and compare its bytes."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator

from fireflyer.errors import FireflyerError
from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings

CHECKS = (
    Check(
        name="fs3",
        figures=(Figure("fs3 write", "MB/s"), Figure("fs3 read", "MB/s")),
        needs="a file system: --fs3, or FIREFLYER_FS",
        duration_s=3.0,
        function="fireflyer.validator.checks.filesystem:run",
    ),
)

BYTES = 32 << 20
FULL_BYTES = 1 << 30
BLOCK = 4 << 20


def run(settings: Settings) -> Iterator[Measured]:
    """Writes a file of random bytes, reads it, compares the bytes and removes the file."""
    where = settings.fs3 or os.environ.get("FIREFLYER_FS", "")
    if not where:
        raise NotRun("no file system is given (--fs3, or FIREFLYER_FS)")
    from fireflyer.fs3 import attach

    blocks = (BYTES if settings.quick else FULL_BYTES) // BLOCK
    data = os.urandom(BLOCK)
    path = f"/.fireflyer-validate-{secrets.token_hex(8)}"
    try:
        with attach(where) as files:
            try:
                begin = time.perf_counter()
                with files.open(path, "wb") as file:
                    for _ in range(blocks):
                        file.write(data)
                yield Measured("fs3 write", blocks * BLOCK / (time.perf_counter() - begin) / 1e6)
                begin, wrong = time.perf_counter(), 0
                with files.open(path, "rb") as file:
                    for _ in range(blocks):
                        wrong += file.read(BLOCK) != data
                rate = blocks * BLOCK / (time.perf_counter() - begin) / 1e6
                failed = f"{wrong} of {blocks} blocks differ from what was written" if wrong else ""
                yield Measured("fs3 read", rate, failed)
            finally:
                with contextlib.suppress(FireflyerError, OSError):
                    files.unlink(path)
    except FireflyerError as error:
        raise NotRun(f"fs3 at {where}: {error}") from None
