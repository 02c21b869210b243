"""Implementation of the read-only verbs of `fireflyer fs`."""

import base64
import fnmatch
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import typer

from fireflyer.cli.fs.impl_changes import each
from fireflyer.cli.printing import age, as_json, show_result, table
from fireflyer.cli.progress import progress
from fireflyer.errors import FileError, FireflyerError
from fireflyer.ffrecord.convert.statistics import size_text
from fireflyer.fs3 import scrub as scrubbing
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Settings
from fireflyer.fs3.client.discovery import attach
from fireflyer.fs3.client.discovery import find as find_place
from fireflyer.fs3.manager.routing import SLOTS
from fireflyer.fs3.meta import Inode
from fireflyer.fs3.meta.messages import Counts
from fireflyer.fs3.scrub import Scrubbed
from fireflyer.program import plain, text

KINDS = {
    "f": stat.S_ISREG,
    "d": stat.S_ISDIR,
    "l": stat.S_ISLNK,
    "p": stat.S_ISFIFO,
    "s": stat.S_ISSOCK,
    "c": stat.S_ISCHR,
    "b": stat.S_ISBLK,
}
NAMES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}
NODE_COLUMNS = (
    *("NODE", "NAME", "LEASE", "HEARD", "SOFTWARE", "TARGETS", "FREE", "DISK", "SCRUBBED"),
    *("ADDRESS", "METRICS"),
)
CHECK_S = 20.0
"""Deadline in seconds of `check` for one read."""
COUNTS_S = 2.0
"""Deadline in seconds of `status` for the metadata service."""


def ls(where: str | None, path: str, *, long: bool, json: bool) -> None:
    with attach(where) as fs:
        found = survey.listing(fs, path)
    show_text = _show_long if long else _show_names
    show_result([_row(one) for one in found], lambda: show_text(found), json=json)


def _show_names(found: Sequence[survey.Found]) -> None:
    for one in found:
        sys.stdout.write(plain(_name(one)) + "\n")


def _show_long(found: Sequence[survey.Found]) -> None:
    rows = []
    for one in found:
        its = one.status
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(its.st_mtime))
        owner = f"{its.st_uid}:{its.st_gid}"
        size = size_text(its.st_size) if one.is_file else "-"
        mode = stat.filemode(its.st_mode)
        rows.append((mode, str(its.st_nlink), owner, size, when, _name(one)))
    table(("MODE", "LINKS", "OWNER", "SIZE", "CHANGED", "NAME"), rows)


def _name(one: survey.Found) -> str:
    name = os.path.basename(one.name.rstrip("/")) or "/"
    return f"{name}/" if one.is_dir and name != "/" else name


def _named(path: str) -> dict[str, Any]:
    """Returns a path for JSON; a path that is not UTF-8 also comes with its bytes in base64."""
    shown = text(path)
    exact = {} if shown == path else {"path_base64": base64.b64encode(os.fsencode(path)).decode()}
    return {"path": shown, **exact}


def _row(one: survey.Found) -> dict[str, Any]:
    its = one.status
    return {
        **_named(one.path),
        "type": NAMES[stat.S_IFMT(its.st_mode)],
        "bytes": its.st_size,
        "mode": stat.S_IMODE(its.st_mode),
        "links": its.st_nlink,
        "uid": its.st_uid,
        "gid": its.st_gid,
        "mtime_ns": its.st_mtime_ns,
    }


def stat_files(where: str | None, paths: list[str], *, json: bool) -> int:
    found: list[tuple[survey.Found, Inode]] = []

    def look(path: str) -> None:
        one = survey.Found(path, fs.lstat(path))
        found.append((one, fs.inode(path, follow_symlinks=False)))

    with attach(where) as fs:
        code = each(paths, look)
    rows = []
    for one, inode in found:
        row = _row(one)
        row |= {
            "inode": inode.number,
            "atime_ns": inode.atime,
            "ctime_ns": inode.ctime,
            "created_ns": inode.btime,
        }
        if inode.target:
            row["target"] = text(os.fsdecode(inode.target))
        if inode.layout is not None:
            row["layout"] = {
                key: getattr(inode.layout, key)
                for key in ("table", "table_version", "chunk_size", "stripe", "seed")
            }
            if one.is_file:
                row["chains"] = inode.chains
        rows.append(row)
    show_result(rows, lambda: _show_attributes(rows), json=json)
    return code


def _show_attributes(rows: Sequence[dict[str, Any]]) -> None:
    for at, row in enumerate(rows):
        if at:
            sys.stdout.write("\n")
        for key, value in row.items():
            sys.stdout.write(f"{key.removesuffix('_ns'):<9} {plain(_shown(key, value))}\n")


def _shown(key: str, value: Any) -> str:
    if key.endswith("_ns"):
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(value // 10**9))}.{value % 10**9:09d}"
    if key == "mode":
        return f"{value:04o}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {its}" for name, its in value.items())
    return str(value)


class Usage(msgspec.Struct):
    """Totals of the entries at and below a path."""

    path: str
    bytes: int = 0
    files: int = 0
    directories: int = 0


def du(where: str | None, paths: list[str], *, json: bool) -> int:
    rows: list[Usage] = []
    missed: list[FileError] = []

    def count(path: str) -> None:
        usage = Usage(path)
        for one in survey.tree(fs, path, missed.append):
            usage.directories += one.is_dir
            usage.files += not one.is_dir
            usage.bytes += one.status.st_size if one.is_file else 0
        rows.append(usage)

    with attach(where) as fs:
        code = each(paths or [one.path for one in survey.listing(fs, "/")], count)
    cells = [(size_text(r.bytes), f"{r.files:,}", f"{r.directories:,}", r.path) for r in rows]
    show_result(
        [{**msgspec.structs.asdict(row), **_named(row.path)} for row in rows],
        lambda: table(("SIZE", "FILES", "DIRECTORIES", "PATH"), cells),
        json=json,
    )
    return _tell_missed(missed) or code


def _tell_missed(missed: list[FileError]) -> int:
    """Reports on stderr the directories that could not be listed; returns the exit code."""
    for error in missed:
        sys.stderr.write(
            plain(f"{error.filename}: {error.strerror}: its contents are skipped") + "\n"
        )
    return int(bool(missed))


def find(where: str | None, path: str, name: str | None, kind: str | None, *, json: bool) -> int:
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"--type {kind!r}: expected one of {', '.join(KINDS)}")

    missed: list[FileError] = []

    def wanted() -> Iterator[survey.Found]:
        for one in survey.tree(fs, path, missed.append):
            if name is not None and not fnmatch.fnmatchcase(os.path.basename(one.name), name):
                continue
            if kind is None or KINDS[kind](one.status.st_mode):
                yield one

    with attach(where) as fs:
        if json:
            as_json([_row(one) for one in wanted()])
        else:
            for one in wanted():
                sys.stdout.write(plain(one.path) + "\n")
    return _tell_missed(missed)


def status(where: str | None, *, json: bool) -> None:
    place = find_place(where)
    found = survey.health(place)
    wrong = survey.problems(found)
    counts = None
    try:
        with attach(where, settings=Settings(deadline_s=COUNTS_S)) as fs:
            counts = fs.statfs()
    except FireflyerError as error:
        wrong.insert(0, f"the metadata service does not answer requests: {error}")
    files, unlinked = (counts.files, counts.unlinked) if counts else (None, None)
    more = {"files": files, "unlinked": unlinked, "problems": wrong}
    result = {**msgspec.structs.asdict(found), **more}
    show_result(result, lambda: _show(found, wrong, counts), json=json)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _show(found: survey.Health, wrong: list[str], counts: Counts | None) -> None:
    states = [chain.state for chain in found.chains]
    counted = ", ".join(f"{states.count(one)} {one}" for one in sorted(set(states)))
    inodes = f"{_counted(counts.files, 'inode')}; " if counts else ""
    sys.stdout.write(
        f"{_counted(len(wrong), 'problem') if wrong else 'no problems'}: "
        f"{inodes}{_counted(len(states), 'chain')}, "
        f"{counted or 'none'} (table version {found.table})\n"
    )
    for line in wrong:
        sys.stdout.write(f"  {plain(line)}\n")
    sys.stdout.write(
        f"manager {plain(found.manager)}, epoch {found.epoch}, routing version {found.version}, "
        f"software {plain(found.software)}\n"
    )
    if counts and counts.unlinked:
        sys.stdout.write(f"{counts.unlinked:,} removed files are still open, or being emptied\n")
    table(NODE_COLUMNS, [_node_row(node, found) for node in found.nodes])
    table(
        ("CHAIN", "VERSION", "STATE", "CHUNKS", "BYTES", "TARGETS"),
        [
            (
                *(str(c.chain), str(c.version), c.state, f"{max(t.chunks for t in c.targets):,}"),
                *(size_text(max(t.bytes for t in c.targets)), survey.members(c)),
            )
            for c in found.chains
        ],
    )


def _node_row(node: survey.NodeState, found: survey.Health) -> tuple[str, ...]:
    known = node.disk_bytes > 0
    own = [t for c in found.chains for t in c.targets if t.target // SLOTS == node.node]
    scrubbed = min((t.scrubbed for t in own), default=0)
    return (
        *(str(node.node), node.name, "runs" if node.alive else "over"),
        f"{age(node.heard_s)} ago" if node.heard_s is not None else "-",
        *(node.version or "-", str(node.targets)),
        size_text(node.free_bytes) if known else "-",
        size_text(node.disk_bytes) if known else "-",
        f"{age(time.time() - scrubbed)} ago" if scrubbed else "never",
        *(node.address, node.metrics or "-"),
    )


def grow(where: str | None, *, json: bool) -> None:
    made = survey.grow(find_place(where))
    line = (
        f"{len(made.added)} chains of {made.replicas} targets made; new files use {made.chains} chains "
        f"(table version {made.version})\n"
    )
    show_result(made, lambda: sys.stdout.write(line), json=json)


def scrub(where: str | None, *, json: bool) -> int:
    found = _scrubbed(where)
    show_result(found, lambda: _show_scrubbed(found), json=json)
    return int(not found.well)


def scrubs(where: str | None, *, json: bool) -> None:
    """Prints when each target was last read, and the damage found."""
    targets = [its for chain in survey.health(find_place(where)).chains for its in chain.targets]
    rows = [
        (
            *(its.name, f"{its.chunks:,}", size_text(its.bytes)),
            f"{age(time.time() - its.scrubbed)} ago" if its.scrubbed else "never",
            *(f"{its.damaged:,}", f"{its.unrepaired:,}"),
        )
        for its in targets
    ]
    heads = ("TARGET", "CHUNKS", "BYTES", "LAST READ", "DAMAGED", "NOT REPAIRED")
    result = [{**msgspec.structs.asdict(its), "name": its.name} for its in targets]
    show_result(result, lambda: table(heads, rows), json=json)


def _scrubbed(where: str | None) -> Scrubbed:
    place = find_place(where)
    total = sum(its.bytes for chain in survey.health(place).chains for its in chain.targets)
    with progress("reading all replicas", total) as advance:
        return scrubbing.scrub(place, advance)


def _show_scrubbed(found: Scrubbed) -> None:
    for name in found.unread:
        sys.stdout.write(
            f"target {name} was not read: it is not open, or its node does not answer\n"
        )
    result = "all whole"
    if found.damaged or found.unrepaired:
        result = f"{found.damaged:,} damaged chunks found; "
        result += f"{found.unrepaired:,} not repaired" if found.unrepaired else "all repaired"
    sys.stdout.write(
        f"{found.targets:,} replicas of chains, {found.chunks:,} chunks, {size_text(found.bytes)} read: "
        f"{result}\n"
    )


def check(where: str | None, path: str, *, all_replicas: bool, json: bool) -> int:
    scrubbed = _scrubbed(where) if all_replicas else None
    found = survey.health(find_place(where))
    with attach(where, settings=Settings(deadline_s=CHECK_S)) as fs:
        total = sum(
            one.status.st_size for one in survey.tree(fs, path, lambda _: None) if one.is_file
        )
        with progress("reading", total) as advance:
            checked = survey.check(fs, path, advance)
    stopped = [chain.chain for chain in found.chains if chain.state == "stopped"]
    degraded = [chain.chain for chain in found.chains if chain.state == "degraded"]
    wrong = survey.problems(found)
    bad = bool(checked.damages or checked.unvisited or checked.nodes or stopped)
    bad = bad or (scrubbed is not None and not scrubbed.well)
    more = {"stopped": stopped, "degraded": degraded, "problems": wrong, "replicas": scrubbed}
    named = {
        key: [{**_named(one.path), "reason": text(one.reason)} for one in ones]
        for key, ones in (("damages", checked.damages), ("unvisited", checked.unvisited))
    }
    result = {**msgspec.structs.asdict(checked), **named, **more}
    show_result(result, lambda: _show_checked(checked, wrong, scrubbed), json=json)
    return int(bad)


def _show_checked(checked: survey.Checked, wrong: list[str], scrubbed: Scrubbed | None) -> None:
    if scrubbed is not None:
        _show_scrubbed(scrubbed)
    for damage in (*checked.damages, *checked.unvisited):
        sys.stdout.write(plain(f"{damage.path}: {damage.reason}") + "\n")
    for line in wrong:
        sys.stdout.write(plain(line) + "\n")
    result = f"{len(checked.damages)} damaged" if checked.damages else "all whole"
    if checked.nodes and not checked.damages:
        nodes = ", ".join(checked.nodes)
        result = f"all files can be read; damaged chunks on {nodes} are being repaired"
    if checked.unvisited:
        result += f"; {len(checked.unvisited)} directories not visited"
    sys.stdout.write(
        f"{_counted(checked.files, 'file')}, {size_text(checked.bytes)} read: {result}\n"
    )
