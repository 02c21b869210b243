"""Implementation of `fireflyer ckpt`."""

import fnmatch
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from fireflyer.checkpoint.directory import compare, survey
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.claims import CLAIMS, Claims, identity
from fireflyer.checkpoint.directory.manifest import DAMAGED, Generation, parse_directory
from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.formats.interchange import KINDS, Part, open_foreign
from fireflyer.checkpoint.formats.interchange import export as export_contents
from fireflyer.checkpoint.retention import Candidate, Keep, retired
from fireflyer.checkpoint.save.stream_writer import save_contents
from fireflyer.checkpoint.state.contents import Contents, nbytes_of
from fireflyer.checkpoint.state.tree import Node, Tensor, path_name
from fireflyer.cli.printing import age, show_result, table
from fireflyer.cli.progress import progress
from fireflyer.errors import CheckpointError, ConfigError
from fireflyer.ffrecord.convert.atomic_output import NewFolder, refuse_existing
from fireflyer.ffrecord.convert.statistics import size_text
from fireflyer.program import encodable, plain
from fireflyer.storage import open_storage

_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SHOWN_CHARACTERS = 60
_TASK = re.compile("t[0-9]+")


def ls(directory: str, *, json: bool) -> None:
    found = survey.summaries(_catalog(directory))
    show_result(found, lambda: _show_summaries(found), json=json)


def _show_summaries(found: Sequence[survey.Summary]) -> None:
    heads = ("STEP", "AGE", "SIZE", "RANKS", "TENSORS", "ATTEMPT", "STATE", "METRICS")
    table(heads, [_row(one) for one in found])
    for one in found:
        if one.reason:
            sys.stdout.write(f"step {one.step}: {plain(one.reason)}\n")


def _row(one: survey.Summary) -> tuple[str, ...]:
    if one.created is None or one.bytes is None:
        return (str(one.step), *("-",) * 5, one.state, "")
    run = str(one.attempt) if not one.task else f"{one.task}/{one.attempt}"
    metrics = " ".join(f"{name}={value:g}" for name, value in _measured(one.metrics).items())
    when = age(time.time() - one.created)
    size = size_text(one.bytes)
    return (
        *(str(one.step), when, size, str(one.world_size), str(one.tensors)),
        *(run if one.attempt else "-", one.state, metrics),
    )


def _measured(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def inspect(
    directory: str, step: int | None, pattern: str | None, *, stats: bool, json: bool
) -> None:
    snapshot = Snapshot.open(_catalog(directory), step)
    manifest = snapshot.manifest
    states = [("", manifest.state)]
    states += [(f"per_rank[{rank}]", nodes) for rank, nodes in manifest.per_rank.items()]
    wanted = [
        (label, node)
        for label, nodes in states
        for node in nodes
        if pattern is None or _matches(node, pattern)
    ]
    if pattern is not None and not wanted:
        raise CheckpointError(f"nothing in {snapshot} matches {pattern}")
    total = sum(nbytes_of(node) for _, node in wanted if isinstance(node, Tensor))
    found: dict[int, compare.Statistics | None] = {}
    if stats:
        with progress("reading", total) as advance:
            for _, node in wanted:
                if isinstance(node, Tensor):
                    found[id(node)] = compare.statistics(snapshot, node)
                    advance(nbytes_of(node))

    def show_text() -> None:
        when = age(time.time() - manifest.created)
        ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
        sys.stdout.write(f"{plain(str(snapshot))}: {ranks}, {when} old\n")
        for label, node in wanted:
            _print_node(label, node, found.get(id(node)), deep=pattern is None)

    result = [_described(label, node, found.get(id(node))) for label, node in wanted]
    show_result(result, show_text, json=json)


def _matches(node: Node, pattern: str) -> bool:
    name = path_name(node.path)
    return isinstance(node, Tensor) and (name == pattern or fnmatch.fnmatchcase(name, pattern))


def _described(label: str, node: Node, stats: compare.Statistics | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": path_name(node.path), "path": node.path, "kind": node.kind}
    if label:
        found["of"] = label
    if isinstance(node, Tensor):
        found |= {"dtype": node.dtype, "shape": node.shape, "bytes": nbytes_of(node)}
        found["pieces"] = [
            {"offsets": one.offsets, "shape": one.shape, "file": one.file} for one in node.pieces
        ]
        if stats is not None:
            found["stats"] = stats
    else:
        found["value"] = getattr(node, "value", None)
    return found


def _print_node(label: str, node: Node, stats: compare.Statistics | None, *, deep: bool) -> None:
    """Prints one line for a node: if `deep`, its last key, indented by its depth; else its full
    name."""
    indent = "  " * len(node.path) if deep else ""
    name = path_name(node.path[-1:] if deep else node.path) if node.path else label or "state"
    text = _clipped(compare.shown(node))
    if isinstance(node, Tensor):
        files = len({piece.file for piece in node.pieces})
        where = f"  {len(node.pieces)} pieces in {files} files" if len(node.pieces) > 1 else ""
        text += f"  {size_text(nbytes_of(node))}{where}"
    sys.stdout.write(f"{indent}{plain(name):<{max(1, 32 - len(indent))}} {plain(text)}\n")
    if stats is not None:
        sys.stdout.write(f"{indent}    {_stats_text(stats)}\n")


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _stats_text(stats: compare.Statistics) -> str:
    parts = []
    if stats.min is not None and stats.max is not None:
        parts.append(
            f"{stats.min:.6g} to {stats.max:.6g}, mean {stats.mean:.6g}, std {stats.std:.6g}"
        )
    parts += [
        f"{count} {what}"
        for count, what in ((stats.nans, "NaN"), (stats.infinities, "inf"), (stats.zeros, "zero"))
        if count
    ]
    most = max(stats.histogram, default=0)
    if most:
        bars = _BARS if encodable(_BARS) else _ASCII_BARS
        parts.append("".join(bars[-(-n * (len(bars) - 1) // most)] for n in stats.histogram))
    return ", ".join(parts) or "no elements"


def verify(directory: str, steps: Sequence[int], *, json: bool) -> int:
    catalog = _catalog(directory)
    chosen = _generations(catalog, steps)
    damaged: set[Generation] = set()
    with progress("verifying", survey.bytes_to_verify(catalog, chosen)) as advance:
        verifier = survey.Verifier(catalog, advance)
        for generation in chosen:
            if verifier.verify(generation):
                damaged.add(generation)
    found = verifier.found
    verdict = f"{len(damaged)} damaged" if damaged else "all whole"
    show_result(found, lambda: _show_verified(found, verdict), json=json)
    return 1 if damaged else 0


def _show_verified(found: survey.Verified, verdict: str) -> None:
    for damage in found.damages:
        names = f" ({', '.join(damage.tensors)})" if damage.tensors else ""
        sys.stdout.write(plain(f"step {damage.step}: {damage.message}{names}") + "\n")
    count = found.checkpoints
    sys.stdout.write(
        f"{count} checkpoint{'' if count == 1 else 's'}, {size_text(found.bytes)} read: {verdict}\n"
    )


def _generations(catalog: Catalog, steps: Sequence[int]) -> list[Generation]:
    """Returns the generations of these steps; without steps all generations."""
    if not steps:
        return catalog.generations()
    found: list[Generation] = []
    for step in steps:
        of_step = catalog.generations(step)
        if not of_step:
            raise CheckpointError(f"there is no checkpoint of step {step} in {catalog.storage}")
        found += of_step
    return found


def diff(directory: str, before: int, other: str, after: int, *, json: bool) -> bool:
    """Prints the differences; returns True if the checkpoints differ."""
    catalog = _catalog(directory)
    old = Snapshot.open(catalog, before)
    new = Snapshot.open(catalog if other == directory else _catalog(other), after)
    total = sum(nbytes_of(node) for node in old.tensors)
    with progress("comparing", total) as advance:
        changes = compare.differences(old, new, advance)
    show_result(changes, lambda: _show_changes(changes), json=json)
    return bool(changes)


def _show_changes(changes: Sequence[compare.Change]) -> None:
    for change in changes:
        sys.stdout.write(plain(_change_text(change)) + "\n")
    counts = dict.fromkeys(("changed", "added", "removed"), 0)
    for change in changes:
        counts[change.kind] += 1
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    sys.stdout.write((text or "no difference") + "\n")


def _change_text(change: compare.Change) -> str:
    head = f"{change.kind:<8} {change.name}: "
    if change.kind != "changed" or change.before != change.after:
        both = [_clipped(text) for text in (change.before, change.after) if text is not None]
        return head + " -> ".join(both)
    text = head + str(change.before)
    if change.max_difference is not None:
        text += f"  max {change.max_difference:.6g}"
    if change.relative is not None:
        text += f"  relative {change.relative:.3g}"
    return text


def _is_exported(name: str) -> bool:
    """Returns True if an export into a folder may create a file of this name."""
    return name == ".metadata" or name.endswith(
        (".distcp", ".safetensors", ".safetensors.index.json")
    )


def export(
    directory: str,
    step: int | None,
    out: Path,
    to: str,
    root: str | None,
    shard: str,
    *,
    force: bool,
    json: bool,
) -> None:
    kind = next((one for one in KINDS if one == to), None)
    if kind is None:
        raise typer.BadParameter(f"--to {to!r}: expected one of {', '.join(KINDS)}")
    shard_bytes = _size(shard)
    contents: Contents = Snapshot.open(_catalog(directory), step)
    if root is not None:
        contents = Part(contents, root)
    folder = kind == "dcp" or (kind == "safetensors" and out.suffix != ".safetensors")
    if not folder:
        refuse_existing(out, force=force)
    total = sum(nbytes_of(node) for node in contents.tensors)
    made = NewFolder(out, force=force, own=_is_exported) if folder else nullcontext()
    with progress(f"exporting {contents}", total) as advance, made as new:
        target = new.path if new is not None else out
        files = export_contents(contents, target, kind, shard_bytes=shard_bytes, advance=advance)
    names = [str(out / Path(file).name) for file in files] if folder else [str(out)]
    count = len(contents.tensors)
    where = names[0] if len(names) == 1 else f"{len(names)} files in {out}"
    line = f"{count} tensors, {size_text(total)}: {plain(where)}\n"
    result = {"files": names, "tensors": count, "bytes": total}
    show_result(result, lambda: sys.stdout.write(line), json=json)


def take_in(source: Path, directory: str, step: int, *, force: bool, json: bool) -> None:
    if not directory:
        raise typer.BadParameter("DIR is empty; use . for the current directory")
    contents = open_foreign(source)
    storage = open_storage(directory)
    if Claims(storage, identity()).newest() and not force:
        raise ConfigError(
            f"{directory} already has checkpoints of runs, and an import fences off a run that is still "
            "active: import into another directory, or use --force if no run is active"
        )
    total = sum(nbytes_of(node) for node in contents.tensors)
    with progress(f"importing {source}", total) as advance:
        generation = save_contents(storage, step, contents, advance)
    count, saved = len(contents.tensors), generation.step
    line = f"{count} tensors, {size_text(total)}: step {saved} in {plain(directory)}\n"
    result = {"step": saved, "tensors": count, "bytes": total}
    show_result(result, lambda: sys.stdout.write(line), json=json)


def prune(
    directory: str,
    *,
    keep: int,
    every: int | None,
    best: int | None,
    metric: str | None,
    mode: Any,
    check: bool,
    dry_run: bool,
    json: bool,
) -> None:
    if (best is None) != (metric is None):
        given, lacking = ("--best", "--metric NAME") if metric is None else ("--metric", "--best N")
        raise typer.BadParameter(
            f"{given} requires {lacking}: give both, e.g. --best 2 --metric loss"
        )
    try:
        policy = Keep(last=keep, every=every, best=best, metric=metric, mode=mode)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    catalog = _catalog(directory)
    whole = list(_whole(catalog, check))
    candidates = [Candidate(one, one.step, manifest.measured()) for one, manifest in whole]
    _refuse_unknown_metric(candidates, metric)
    gone = retired(candidates, policy)
    kept = [one.step for one in candidates if one not in gone]
    if not dry_run:
        catalog.delete([one.generation for one in gone])
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(str(step) for step in kept) or "none"
    lines = [f"{verb} step {one.step}\n" for one in gone]
    lines.append(f"{verb} {len(gone)} of {len(candidates)}; kept: {steps}\n")
    result = {"removed": [one.step for one in gone], "kept": kept, "dry_run": dry_run}
    show_result(result, lambda: sys.stdout.writelines(lines), json=json)


def _refuse_unknown_metric(candidates: Sequence[Candidate], metric: str | None) -> None:
    """Checks that some checkpoint has the metric of --best.

    Raises:
        CheckpointError: no checkpoint has the metric, so --best would keep none.
    """
    known = {name for one in candidates for name in one.metrics}
    if candidates and metric is not None and metric not in known:
        names = ", ".join(sorted(known)) or "none"
        raise CheckpointError(
            f"no checkpoint has the metric {metric}, so none is removed; known metrics: {names}"
        )


def _whole(catalog: Catalog, check: bool) -> Iterator[tuple[Generation, Any]]:
    """Yields the checkpoints that have all their files; if `check`, only those with intact bytes."""
    found = list(catalog.whole())
    if not check:
        yield from found
        return
    total = survey.bytes_to_verify(catalog, [generation for generation, _ in found])
    with progress("verifying", total) as advance:
        verifier = survey.Verifier(catalog, advance)
        for generation, manifest in found:
            damages = verifier.verify(generation)
            if damages is None:
                continue
            if not damages:
                yield generation, manifest
                continue
            text = f"step {generation.step} is damaged and stays: {damages[0].message}"
            sys.stderr.write(f"fireflyer: {plain(text)}\n")


def _catalog(directory: str) -> Catalog:
    """Opens the catalog of a checkpoint directory.

    Raises:
        ConfigError: the directory does not exist, or holds nothing that a manager wrote.
    """
    if not directory:
        raise typer.BadParameter("DIR is empty; use . for the current directory")
    if "://" not in directory and not Path(directory).is_dir():
        task = (
            f"; `fireflyer show {directory}` names the folder of a task"
            if _TASK.fullmatch(directory)
            else ""
        )
        raise ConfigError(f"directory {directory} does not exist{task}")
    storage = open_storage(directory)
    if not any(
        name in (CLAIMS, DAMAGED) or parse_directory(name) is not None for name in storage.list()
    ):
        below = "" if "://" in directory else _nearest(Path(directory))
        hint = f"; a folder below has: {below}" if below else ""
        raise ConfigError(
            f"no run has saved in {directory}: it has neither checkpoints nor claims{hint}"
        )
    return Catalog(storage)


def _nearest(directory: Path) -> str:
    """Returns the first folder, at most two levels below, in which a run has saved, or ""."""
    for pattern in (f"*/{CLAIMS}", f"*/*/{CLAIMS}"):
        if found := min(directory.glob(pattern), default=None):
            return str(found.parent)
    return ""


def _size(text: str) -> int:
    """Returns the number of bytes of a size: "5G" (5 * 10**9), "500M" or "1000".

    Raises:
        BadParameter: the text is not a size.
    """
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
        raise typer.BadParameter(
            f"--shard-size {text!r}: expected e.g. 500M, 5G or a number of bytes"
        )
    return int(digits) * unit
