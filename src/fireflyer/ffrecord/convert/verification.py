"""Verification of every sample of record files, and the first damages found."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fireflyer.errors import Corrupted, FireflyerError, StorageError
from fireflyer.ffrecord.convert.formats.records import batches
from fireflyer.ffrecord.convert.record_writer import row_bytes
from fireflyer.ffrecord.convert.source import reading
from fireflyer.ffrecord.paths import is_url, record_path
from fireflyer.ffrecord.remote import Reader, open_records


@dataclass(slots=True)
class Checked:
    """Result of a check; `damages` are messages, limited to the requested number."""

    files: int = 0
    samples: int = 0
    bad_files: int = 0
    damages: list[str] = field(default_factory=list)
    more: bool = False
    """True if more damages than the listed ones exist; the check then stopped."""


def verify(
    files: Sequence[str], *, data: bool, most: int, advance: Callable[[int, int], None]
) -> Checked:
    """Checks files one by one; never raises for damaged content.

    Args:
        files: the record files.
        data: True to check the samples, too; False for the metadata only.
        most: maximum number of damages to list; the check stops at the next damage.
        advance: called with the number of samples so far, and the bytes of the last batch.

    Raises:
        ConfigError, StorageError: a name is not that of a record file, or a file cannot be opened.
    """
    for name in files:
        _openable(name)
    found = Checked()
    for name in files:
        before = len(found.damages)
        try:
            with open_records(name) as reader:
                if data:
                    _samples(reader, found, most, advance)
                else:
                    reader.validate(data=False)
                    found.samples += reader.n
        except FireflyerError as error:
            _note(found, most, str(error))
        found.files += 1
        found.bad_files += len(found.damages) > before
        if found.more:
            break
    return found


def _openable(name: str) -> None:
    path = record_path(name)
    if is_url(path):
        with contextlib.suppress(Corrupted):
            open_records(path).close()
        return
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise reading(path, error) from error


def _samples(
    reader: Reader, found: Checked, most: int, advance: Callable[[int, int], None]
) -> None:
    for batch in batches(reader, range(reader.n)):
        try:
            size = _read(reader, batch)
        except StorageError:
            size = _one_by_one(reader, batch, found, most)
        found.samples += len(batch)
        advance(found.samples, size)
        if found.more:
            return


def _read(reader: Reader, batch: list[int]) -> int:
    """Reads and checks samples, decoding rows; returns their bytes."""
    if reader.columns is not None:
        return sum(row_bytes(row) for row in reader.rows(batch))
    return reader.read_batch(batch)[0].nbytes


def _one_by_one(reader: Reader, batch: Sequence[int], found: Checked, most: int) -> int:
    size = 0
    for index in batch:
        try:
            size += _read(reader, [index])
        except StorageError as error:
            _note(found, most, str(error))
            if found.more:
                break
    return size


def _note(found: Checked, most: int, message: str) -> None:
    if len(found.damages) < most:
        found.damages.append(message)
    else:
        found.more = True


def worst(found: Checked) -> str:
    """Returns the result in one line."""
    if not found.damages:
        return f"{found.files} files, {found.samples:,} samples: all sound"
    named = "at least " if found.more else ""
    count = f"{len(found.damages)} damage{'s' if len(found.damages) != 1 else ''}"
    return f"{named}{count} in {found.bad_files} of {found.files} files checked"


def total_samples(files: Sequence[str]) -> int:
    """Returns the number of samples of all readable files; the check reports the other files."""
    total = 0
    for name in files:
        try:
            with open_records(name) as reader:
                total += reader.n
        except FireflyerError:
            continue
    return total
