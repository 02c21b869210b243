"""Functions for pack, merge and split, which write the rows of a source to record files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.atomic_output import NewFolder, refuse_existing
from fireflyer.ffrecord.convert.formats.folder import FolderSource
from fireflyer.ffrecord.convert.formats.records import (
    RecordSource,
    columns_of,
    is_compressed,
    is_packed_folder,
)
from fireflyer.ffrecord.convert.record_writer import Advance, Form, Plan, Written, write_rows
from fireflyer.ffrecord.convert.source import Column, Row, Source, describe
from fireflyer.ffrecord.folder import pack_folder
from fireflyer.ffrecord.remote import open_records


def pack(source: Source, plan: Plan, jobs: int, advance: Advance) -> Written:
    """Writes all rows of `source` to record files; raises what the source and `write_rows` do."""
    with closing(closable(source.rows(jobs))) as rows:
        plan = replace(plan, total=source.length, sources=source.paths)
        return write_rows(rows, source.columns, plan, advance)


def pack_tree(source: FolderSource, plan: Plan) -> Written:
    """Writes a folder as one packed folder: one sample per file, then the tree of names."""
    refuse_existing(plan.out, force=plan.force)
    pack_folder(source.name, plan.out)
    return Written([str(plan.out)], source.length or 0, plan.out.stat().st_size)


def same_kind(files: Sequence[str]) -> RecordSource:
    """Opens record files as one sequence for copying their samples unchanged.

    Raises:
        ConfigError: the columns differ, or a file is a packed folder, whose tree of names would not
            match the copied samples.
    """
    first: tuple[Column, ...] | None = None
    for name in files:
        with open_records(name) as reader:
            columns = columns_of(reader)
            if not columns and is_packed_folder(reader):
                raise ConfigError(
                    f"cannot copy the packed folder {name}: its tree of names belongs to this file; "
                    "turn it into rows with `fireflyer record convert`"
                )
        if first is not None and columns != first:
            raise ConfigError(
                f"{name} has columns {describe(columns) or 'none'}, {files[0]} has "
                f"{describe(first) or 'none'}: convert one of them first"
            )
        first = columns
    return RecordSource(files, raw=True)


def form_of(source: RecordSource, compression: str | None) -> Form:
    """Returns the form of copies of `source`. With `compression`, that is v2 with this compression;
    otherwise it is the form of `source`."""
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
    """Writes a folder with one `NAME.ffr` per fraction; samples in order, or shuffled by `seed`.

    Raises:
        ConfigError: fractions that do not sum to 1, or names that do not match the fractions.
    """
    counts = shares(source.length or 0, fractions)
    if len(names) != len(fractions) or len(set(names)) != len(names):
        raise ConfigError(f"{len(fractions)} fractions need {len(fractions)} different names")
    if any("/" in name or name.startswith(".") or not name for name in names):
        raise ConfigError(f"invalid names {', '.join(map(repr, names))}: expected names of files")
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
    """Returns an integer near `total` times each fraction; the integers sum to `total`.

    Raises:
        ConfigError: a fraction is not positive, or the fractions do not sum to 1.
    """
    if not all(f > 0 for f in fractions) or not abs(sum(fractions) - 1) < 1e-6:
        raise ConfigError(f"fractions must be positive and sum to 1, not {list(fractions)}")
    ends = [round(total * end) for end in np.cumsum(fractions).tolist()]
    ends[-1] = total
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _from(advance: Advance, samples: int, size: int) -> Callable[[int, int], None]:
    return lambda count, held: advance(samples + count, size + held)


def closable(rows: Iterator[Row]) -> Any:
    """Returns `rows` with a `close` method; closing a generator also ends its threads."""
    return (row for row in rows) if not hasattr(rows, "close") else rows
