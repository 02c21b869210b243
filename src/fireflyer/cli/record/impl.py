"""Implementation of `fireflyer record`."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from fireflyer.cli.printing import show_result, table
from fireflyer.cli.progress import progress
from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert import exporters, repack, statistics, verification
from fireflyer.ffrecord.convert.atomic_output import refuse_existing, write_atomically
from fireflyer.ffrecord.convert.detect import open_source
from fireflyer.ffrecord.convert.formats.folder import FolderSource
from fireflyer.ffrecord.convert.formats.records import RecordSource, file_names
from fireflyer.ffrecord.convert.json_text import NAN_FORMS, JsonEncoder
from fireflyer.ffrecord.convert.preview import as_text, page
from fireflyer.ffrecord.convert.record_writer import Form, Plan, Written
from fireflyer.ffrecord.convert.source import Row, as_array
from fireflyer.program import plain
from fireflyer.storage.targets import is_stream
from fireflyer.units import parse_size

FORMS = ("raw", "text", "json", "hex")
_SHOW_EVERY = 256
"""Samples between two updates of a progress bar."""


def pack(
    paths: list[str],
    out: Path,
    *,
    kind: str | None,
    columns: str | None,
    files: int | None,
    file_size: str | None,
    form: Form,
    jobs: int,
    force: bool,
    json: bool,
) -> None:
    if files is not None and file_size is not None:
        raise typer.BadParameter("--files and --file-size exclude each other")
    source = open_source(paths, kind, _names(columns))
    plan = _plan(out, source.length, None, files, file_size, form, force)
    if isinstance(source, FolderSource) and form.version == 1 and not plan.parts:
        with _progress(f"packing {source.name}", None):
            _done(repack.pack_tree(source, plan), json=json)
        return
    with _progress(f"packing {source.name}", source.length) as advance:
        written = repack.pack(source, plan, jobs, advance)
    _done(written, json=json)


def ls(files: list[str], *, json: bool, html: Path | None, samples: int, force: bool) -> None:
    names = file_names(files)
    with _notes():
        if html is not None:
            refuse_existing(html, force=force)
            text = page(names, samples)
            write_atomically(html, lambda path: _write_text(path, text))
            if is_stream(html):
                return  # `html` may be stdout, so nothing else is printed
        found = [statistics.describe_file(name) for name in names]
    show_result(found, lambda: _show_files(found, html), json=json)


def _show_files(found: Sequence[statistics.Listed], html: Path | None) -> None:
    rows = []
    for each in found:
        stats = each.lengths
        rows.append(
            (
                each.file,
                f"v{each.version}{' zstd' if each.compressed else ''}",
                f"{each.samples:,}",
                statistics.size_text(each.bytes),
                *(
                    statistics.size_text(size)
                    for size in ((stats.min, stats.median, stats.max) if stats else ())
                ),
                *(() if stats else ("-",) * 3),
                statistics.columns_text(each),
            )
        )
    table(("FILE", "FORMAT", "SAMPLES", "SIZE", "MIN", "MEDIAN", "MAX", "COLUMNS"), rows)
    if len(found) > 1:
        total = sum(each.samples for each in found)
        size = statistics.size_text(sum(each.bytes for each in found))
        sys.stdout.write(f"{len(found)} files, {total:,} samples, {size}\n")
    if html is not None:
        sys.stdout.write(f"written: {plain(str(html))}\n")


def cat(file: str, indices: list[int], *, form: str, column: str | None, nan: str | None) -> None:
    nan = _nan(nan)
    if form and form not in FORMS:
        raise typer.BadParameter(f"--as {form!r}: expected one of {', '.join(FORMS)}")
    with _notes():
        source = RecordSource(file)
    total = source.length or 0
    for index in indices:
        if not 0 <= index < total:
            has = f"has samples 0 to {total - 1}, not {index}" if total else "has no samples"
            raise ConfigError(f"{file} {has}")
    if column is not None and column not in {each.name for each in source.columns}:
        known = ", ".join(each.name for each in source.columns)
        raise ConfigError(f"{file} has no column {column!r}; its columns: {known}")
    chosen = form or ("raw" if source.kind == "bytes" or column is not None else "json")
    out = sys.stdout.buffer
    for row in source.rows_at(indices):
        shown = row if column is None else {column: row[column]}
        out.write(_shown(shown, chosen, nan))
    out.flush()


def verify(files: list[str], *, data: bool, most: int, json: bool) -> int:
    names = file_names(files)
    with _notes():
        total = verification.total_samples(names) if data else None
        with _progress("verifying", total) as advance:
            found = verification.verify(names, data=data, most=most, advance=advance)
    lines = [*map(plain, found.damages), verification.worst(found)]
    show_result(found, lambda: sys.stdout.writelines(f"{one}\n" for one in lines), json=json)
    return 1 if found.damages else 0


def merge(files: list[str], out: Path, *, compression: str | None, force: bool, json: bool) -> None:
    _check_compression(compression)
    with _notes():
        source = repack.same_kind(file_names(files))
    with _progress(f"merging {source.name}", source.length) as advance:
        form = repack.form_of(source, compression)
        written = repack.pack(source, Plan(out=out, form=form, force=force), 1, advance)
    _done(written, json=json)


def split(
    files: list[str],
    out: Path,
    *,
    count: int | None,
    parts: int | None,
    file_size: str | None,
    fractions: str | None,
    names: str | None,
    shuffle: int | None,
    compression: str | None,
    force: bool,
    json: bool,
) -> None:
    ways = [way for way in (count, parts, file_size, fractions) if way is not None]
    if len(ways) != 1:
        raise typer.BadParameter(
            "give exactly one of --count, --files, --file-size and --fractions"
        )
    if fractions is None and (names is not None or shuffle is not None):
        raise typer.BadParameter("--names and --shuffle require --fractions")
    wanted = None if fractions is None else _fractions(fractions)
    _check_compression(compression)
    with _notes():
        source = repack.same_kind(file_names(files))
    form = repack.form_of(source, compression)
    if wanted is None:
        plan = _plan(out, source.length, count, parts, file_size, form, force)
        with _progress(f"splitting {source.name}", source.length) as advance:
            written = repack.pack(source, plan, 1, advance)
    else:
        called = names.split(",") if names is not None else [f"part{i}" for i in range(len(wanted))]
        with _progress(f"splitting {source.name}", source.length) as advance:
            written = repack.split_by_fractions(
                source, wanted, called, out, form, seed=shuffle, force=force, advance=advance
            )
    _done(written, json=json)


def convert(
    paths: list[str],
    out: Path,
    *,
    to: str,
    kind: str | None,
    columns: str | None,
    form: Form,
    nan: str | None,
    jobs: int,
    force: bool,
    json: bool,
) -> None:
    target = to or out.suffix.removeprefix(".")
    if target not in ("ffr", *exporters.EXPORTS):
        known = ", ".join(exporters.EXPORTS)
        raise typer.BadParameter(f"--to {target!r}: expected one of ffr, {known}")
    if target != "ffr" and form != Form():
        raise typer.BadParameter(f"--format and --compression require --to ffr, not {target}")
    if nan is not None and target != "jsonl":
        raise typer.BadParameter(f"--nan requires --to jsonl, not {target}")
    nan = _nan(nan)
    with _notes():
        source = open_source(paths, kind, _names(columns))
    with _progress(f"converting {source.name}", source.length) as advance:
        if target == "ffr":
            plan = Plan(out=out, form=form, force=force)
            written = repack.pack(source, plan, jobs, advance)
        else:
            written = exporters.export(source, target, out, force, advance, nan)
    _done(written, json=json)


def _names(columns: str | None) -> list[str] | None:
    return None if columns is None else columns.split(",")


def _plan(
    out: Path,
    total: int | None,
    count: int | None,
    files: int | None,
    file_size: str | None,
    form: Form,
    force: bool,
) -> Plan:
    per_file = count
    if files is not None:
        if total is None:
            raise ConfigError(
                "--files needs the length of the source, which is unknown; use --file-size"
            )
        per_file = max(1, -(-total // files))
    size = None if file_size is None else _size(file_size)
    return Plan(out=out, per_file=per_file, file_bytes=size, form=form, force=force)


def form_of(version: str, compression: str | None) -> Form:
    """Returns the format that --format and --compression select.

    Raises:
        BadParameter: an unknown value, or v1 with compression.
    """
    if version not in ("auto", "v1", "v2"):
        raise typer.BadParameter(f"--format {version!r}: expected one of auto, v1, v2")
    _check_compression(compression)
    if version == "v1" and compression is not None:
        raise typer.BadParameter("v1 files cannot hold compressed samples: use --format v2")
    return Form(None if version == "auto" else int(version[1:]), compression)


def _check_compression(compression: str | None) -> None:
    if compression not in (None, "zstd"):
        raise typer.BadParameter(f"--compression {compression!r}: expected zstd")


def _nan(given: str | None) -> str:
    """Returns the form of NaN that --nan selects."""
    nan = NAN_FORMS[0] if given is None else given
    if nan not in NAN_FORMS:
        raise typer.BadParameter(f"--nan {nan!r}: expected one of {', '.join(NAN_FORMS)}")
    return nan


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"--file-size: {error}") from None


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--fractions {text!r}: expected numbers, e.g. 0.9,0.1") from None


def _shown(row: Row, form: str, nan: str) -> bytes:
    if form == "json":
        return JsonEncoder(nan).row(row) + b"\n"
    parts = []
    for name, value in row.items():
        data = _raw(name, value, nan)
        if form == "hex":
            data = _hex(data).encode()
        elif form == "text":
            text = as_text(data) if not isinstance(value, str) else value
            if text is None:
                raise ConfigError(f"column {name!r} is not text: use --as hex, raw or json")
            data = text.encode() + b"\n"
        parts.append(data)
    return b"".join(parts)


def _raw(name: str, value: Any, nan: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list | dict):
        return JsonEncoder(nan).value(name, value)
    array = as_array(value)
    return b"" if array is None else array.tobytes()


def _hex(data: bytes) -> str:
    """Formats 16 bytes a line: offset, bytes, characters."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        seen = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
        lines.append(f"{at:08x}  {part.hex(' '):<47}  {seen}\n")
    return "".join(lines)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _done(written: Written, *, json: bool) -> None:
    if is_stream(written.files[0]):
        return  # the output may be stdout, so nothing else is printed
    size = statistics.size_text(written.bytes)
    where = plain(written.files[0])
    if len(written.files) > 1:
        where = f"{len(written.files)} files in {plain(os.path.dirname(written.files[0]))}"
    line = f"{written.samples:,} samples, {size}: {where}\n"
    result = {"files": written.files, "samples": written.samples, "bytes": written.bytes}
    show_result(result, lambda: sys.stdout.write(line), json=json)


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Shows progress; the yielded function takes the samples and the bytes so far."""
    shown = 0
    with progress(title, total, "samples") as advance:

        def upto(samples: int, held: int) -> None:
            nonlocal shown
            if samples - shown >= _SHOW_EVERY or samples == total:
                advance(samples - shown)
                shown = samples

        yield upto


@contextmanager
def _notes() -> Iterator[None]:
    """Prints warnings about files (old files without a checksum) as one line each on stderr."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        sys.stderr.write(f"fireflyer: {plain(str(message))}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
