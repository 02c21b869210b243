"""Packing, merging, splitting and exporting: rows from a source to a place."""

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.folder import FolderSource
from fireflyer.ffrecord.convert.placing import NewFolder, refuse_existing, write_atomically
from fireflyer.ffrecord.convert.records import (
    RecordSource,
    columns_of,
    is_compressed,
    is_packed_folder,
)
from fireflyer.ffrecord.convert.source import Column, Row, Source, as_array, describe
from fireflyer.ffrecord.convert.writing import (
    Advance,
    Form,
    Plan,
    Written,
    row_bytes,
    write_rows,
)
from fireflyer.ffrecord.folder import pack_folder
from fireflyer.ffrecord.output import BLOCK
from fireflyer.ffrecord.remote import open_records

EXPORTS = ("tar", "jsonl", "npy")


def pack(source: Source, plan: Plan, jobs: int, advance: Advance) -> Written:
    """All rows of `source` into record files; raises what the source and `write_rows` do."""
    with closing(_closable(source.rows(jobs))) as rows:
        plan = replace(plan, total=source.length, sources=source.paths)
        return write_rows(rows, source.columns, plan, advance)


def pack_tree(source: FolderSource, plan: Plan) -> Written:
    """A folder as one packed folder: a sample a file, then the tree of names."""
    refuse_existing(plan.out, force=plan.force)
    pack_folder(source.name, plan.out)
    return Written([str(plan.out)], source.length or 0, plan.out.stat().st_size)


def same_kind(files: Sequence[str]) -> RecordSource:
    """Record files as one sequence whose samples can be copied as they are.

    Raises:
        ConfigError: their columns differ, or one is a packed folder, whose tree would not fit any more.
    """
    first: tuple[Column, ...] | None = None
    for name in files:
        with open_records(name) as reader:
            columns = columns_of(reader)
            if not columns and is_packed_folder(reader):
                raise ConfigError(
                    f"{name} is a packed folder, whose tree of names belongs to this one file: "
                    "`fireflyer record convert` makes rows of it"
                )
        if first is not None and columns != first:
            raise ConfigError(
                f"{name} has columns {describe(columns) or 'none'}, {files[0]} has "
                f"{describe(first) or 'none'}: convert one of them first"
            )
        first = columns
    return RecordSource(files, raw=True)


def form_of(source: RecordSource, compression: str | None) -> Form:
    """The form that keeps what `source` is: its version, and whether it is compressed."""
    if compression is None and is_compressed(source.reader):
        compression = "zstd"
    return Form(2 if compression is not None else source.version, compression)


def split_by_fractions(
    source: RecordSource,
    fractions: Sequence[float],
    names: Sequence[str],
    out: Path,
    form: Form,
    *,
    seed: int | None,
    force: bool,
    advance: Advance,
) -> Written:
    """A folder of `NAME.ffr`, one for each fraction; samples in order, or shuffled by `seed`.

    Raises:
        ConfigError: fractions that are no parts of one whole, or names that do not fit them.
    """
    counts = shares(source.length or 0, fractions)
    if len(names) != len(fractions) or len(set(names)) != len(names):
        raise ConfigError(f"{len(fractions)} fractions need as many different names")
    if any("/" in name or name.startswith(".") or not name for name in names):
        raise ConfigError(f"names of files, not {', '.join(map(repr, names))}")
    total = source.length or 0
    own = {f"{name}.ffr" for name in names}
    order = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
    first = size = 0
    with NewFolder(out, force=force, own=own.__contains__, sources=source.paths) as folder:
        for name, count in zip(names, counts, strict=True):
            plan = Plan(out=folder.path / f"{name}.ffr", total=count, form=form)
            rows = source.rows_at(order[first : first + count])
            size += write_rows(rows, source.columns, plan, _from(advance, first, size)).bytes
            first += count
    return Written([str(out / f"{name}.ffr") for name in names], total, size)


def shares(total: int, fractions: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total` and are nearest to its `fractions`.

    Raises:
        ConfigError: a fraction is not positive, or they do not sum to 1.
    """
    if not all(f > 0 for f in fractions) or not abs(sum(fractions) - 1) < 1e-6:
        raise ConfigError(f"fractions must be positive and sum to 1, not {list(fractions)}")
    ends = [round(total * end) for end in np.cumsum(fractions).tolist()]
    ends[-1] = total
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def export(source: Source, kind: str, out: Path, force: bool, advance: Advance) -> Written:
    """All rows as a tar, as JSON lines, or as a folder with an `.npy` for each column.

    Raises:
        ConfigError: a column has no place in that format, or the target is in the way.
        NoSpace, StorageError: it cannot be written.
    """
    if kind != "npy":
        refuse_existing(out, force=force)
    with closing(_closable(source.rows())) as rows:
        counted = _counted(rows, advance)
        if kind == "npy":
            own = {f"{column.name}.npy" for column in source.columns}
            with NewFolder(out, force=force, own=own.__contains__, sources=source.paths) as folder:
                count = _to_npy(counted, source, folder.path)
            files = sorted(out.glob("*.npy"))
            return Written([str(f) for f in files], count, sum(f.stat().st_size for f in files))
        count = 0

        def fill(path: Path) -> None:
            nonlocal count
            count = (_to_tar if kind == "tar" else _to_jsonl)(counted, path)

        write_atomically(out, fill)
    return Written([str(out)], count, out.stat().st_size)


def _to_tar(rows: Iterable[Row], path: Path) -> int:
    count = 0
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for row in rows:
            # Keys that are the sample's numbers keep every row a sample of its own.
            for name, value in row.items():
                suffix, data = _tar_member(name, value)
                info = tarfile.TarInfo(f"{count:09d}.{suffix}")
                info.size, info.mode = len(data), 0o644
                archive.addfile(info, io.BytesIO(data))
            count += 1
    return count


def _tar_member(name: str, value: Any) -> tuple[str, bytes]:
    """Suffix and bytes of one value, as `TarSource` reads them back."""
    if name in ("", "key") or "/" in name or "\0" in name:
        name = f"field_{name.replace('/', '_')}".replace("\0", "_")
    last = name.rpartition(".")[2].lower()
    if isinstance(value, str):
        return (name if last in ("txt", "json") else f"{name}.txt"), value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return (f"{name}.bin" if last in ("txt", "json", "cls", "npy") else name), bytes(value)
    array = np.asarray(value)
    if not array.shape and array.dtype.kind in "iu":
        return (name if last == "cls" else f"{name}.cls"), str(int(array)).encode()
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return (name if last == "npy" else f"{name}.npy"), buffer.getvalue()


def _to_jsonl(rows: Iterable[Row], path: Path) -> int:
    count = 0
    with open(path, "wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(as_plain(row)) + b"\n")
            count += 1
    return count


def as_plain(row: Row) -> dict[str, Any]:
    """A row for JSON: bytes as base64, arrays as lists.

    Raises:
        ConfigError: a number that JSON does not have.
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        array = as_array(value)
        if array is None:
            found[name] = bytes(value) if isinstance(value, bytearray | memoryview) else value
            continue
        if array.dtype.kind == "c" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
            raise ConfigError(f"column {name!r}: JSON has no such number as {array.ravel()[:3]}")
        found[name] = array.tolist()
    return found


def _to_npy(rows: Iterable[Row], source: Source, folder: Path) -> int:
    for column in source.columns:
        if column.dtype in ("bytes", "str") or None in column.shape:
            raise ConfigError(
                f"{source.name}: column {column.name!r} is {column.text}; an array needs numbers of "
                "one shape: choose columns by --columns, or another format"
            )
        if "/" in column.name or column.name.startswith("."):
            raise ConfigError(f"{source.name}: column {column.name!r} cannot name a file")
    count = 0
    with ExitStack() as files:
        arrays = [
            files.enter_context(_ArrayFile(folder / f"{column.name}.npy", column))
            for column in source.columns
        ]
        for row in rows:
            for array in arrays:
                array.add(row[array.column.name])
            count += 1
    return count


class _ArrayFile:
    """An `.npy` that grows row by row; by writes, because a full disk kills who writes by a mapping."""

    def __init__(self, path: Path, column: Column) -> None:
        self.column = column
        self._shape = tuple(size for size in column.shape if size is not None)
        self._rows = 0
        self._file = open(path, "wb", buffering=BLOCK)  # noqa: SIM115

    def __enter__(self) -> Self:
        self._place = self._head()
        return self

    def add(self, value: Any) -> None:
        array = np.ascontiguousarray(value, self.column.dtype)
        if np.shape(value) != self._shape:
            raise ConfigError(
                f"row {self._rows}: column {self.column.name!r} has shape {list(np.shape(value))}, "
                f"not {list(self._shape)}"
            )
        self._file.write(array.tobytes())
        self._rows += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file as file:
            if kind is None:
                file.seek(0)
                # numpy leaves room in a header for any number of rows.
                if self._head() != self._place:
                    raise ConfigError(f"numpy's header of {self.column.name!r} changed its size")
                file.flush()
                os.fsync(file.fileno())

    def _head(self) -> int:
        """Writes the header for the rows so far; where it ends."""
        dtype = np.dtype(self.column.dtype).newbyteorder("<")
        description = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._shape),
        }
        np.lib.format.write_array_header_2_0(self._file, description)
        return self._file.tell()


def _counted(rows: Iterable[Row], advance: Advance) -> Iterator[Row]:
    held = 0
    for count, row in enumerate(rows, 1):
        held += row_bytes(row)
        advance(count, held)
        yield row


def _from(advance: Advance, samples: int, size: int) -> Callable[[int, int], None]:
    return lambda count, held: advance(samples + count, size + held)


def _closable(rows: Iterator[Row]) -> Any:
    """A generator over `rows`: closing it closes theirs, whose threads end with it."""
    return (row for row in rows) if not hasattr(rows, "close") else rows
