"""A manifest from outside: what could leave its folder, or could not be written, is refused by type."""

import os
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.errors import Corrupted, WorkspaceError
from fireflyer.hai.workspaces import manifest as manifests
from fireflyer.hai.workspaces.manifest import Entry, Manifest, decode, encode, identify
from fireflyer.hai.workspaces.materialize import place, write_all

HASH = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def file(path: str, **fields: Any) -> Entry:
    return msgspec.structs.replace(Entry(path=path, kind="file", mode=0o644, sha256=HASH), **fields)


def folder(path: str, mode: int = 0o755) -> Entry:
    return Entry(path=path, kind="directory", mode=mode)


def link(path: str, target: str) -> Entry:
    return Entry(path=path, kind="link", target=target)


def test_a_manifest_has_one_form_and_one_id() -> None:
    made = Manifest(entries=(folder("a"), file("a/b"), link("c", "a/b")))
    assert decode(encode(made)) == made
    assert identify(decode(encode(made))) == identify(made)
    assert identify(Manifest(entries=(folder("a"),))) != identify(made)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([file("../x")], "not a plain relative path"),
        ([file("/etc/passwd")], "not a plain relative path"),
        ([folder("a"), file("a/../../x")], "not a plain relative path"),
        ([file("./x")], "not a plain relative path"),
        ([file("a//b")], "not a plain relative path"),
        ([file("")], "not a plain relative path"),
        ([file("x\0y")], "control characters"),
        ([file("x\ny")], "control characters"),
        ([file("x\u202ey")], "control characters"),
        ([file("n" * 256)], "more than 255 bytes"),
        ([file("a"), file("a")], "twice, or not in order"),
        ([file("b"), file("a")], "twice, or not in order"),
        ([file("README"), file("readme")], "differ only in case"),
        ([file("\u00e9"), file("e\u0301")], "not in order|differ only in case or in form"),
        ([file("stra\u00dfe"), file("strasse")], "not in order|differ only in case"),
        ([file("a/b")], "not a listed directory"),
        ([file("a"), file("a/b")], "not a listed directory"),
        ([link("a", "b"), file("a/x")], "not a listed directory"),
        ([folder(".git")], "in a .git folder"),
        ([folder("a"), file("a/.GIT")], "in a .git folder"),
        ([link("a", "/etc")], "leads out"),
        ([link("a", "..")], "leads out"),
        ([link("a", "b"), link("b", "a")], "leads out"),
        ([link("a", "a")], "leads out"),
        ([folder("d"), folder("d/e"), link("d/e/up", "../.."), link("x", "d/e/up/..")], "leads out"),
        ([file("a", sha256="")], "must have a hash"),
        ([file("a", sha256=HASH.upper())], "not a SHA-256"),
        ([file("a", sha256="../" + HASH[3:])], "not a SHA-256"),
        ([file("a", size=1), file("b", size=2)], "another size"),
        ([Entry(path="a", kind="directory", mode=0o755, sha256=HASH)], "must have a hash"),
        ([folder("a", 0o500)], "usable by its owner"),
        ([Entry(path="a", kind="link")], "must have a target"),
        ([link("a", "b\0c")], "an invalid target"),
        ([file("big", size=(4 << 30) + 1)], "at most 4 GiB: big"),
    ],
)  # fmt: skip
def test_refused(entries: list[Entry], message: str) -> None:
    with pytest.raises(WorkspaceError, match=message):
        manifests.check(Manifest(entries=tuple(entries)))


def test_too_many_names() -> None:
    entries = tuple(file(f"{i:06}") for i in range(manifests.MAX_ENTRIES + 1))
    with pytest.raises(WorkspaceError, match="at most 100000 names"):
        manifests.check(Manifest(entries=entries))


@pytest.mark.parametrize("mode", [0o1777, 0o4755, -1])
def test_no_mode_beyond_the_permissions(mode: int) -> None:
    data = b'{"entries":[{"path":"a","kind":"directory","mode":%d}]}' % mode
    with pytest.raises(WorkspaceError, match="cannot be read"):
        decode(data)


def test_links_that_stay_inside() -> None:
    entries = (folder("a"), link("a/up", ".."), link("b", "a/up/a/up/a"), link("c", "nothing/here"))
    manifests.check(Manifest(entries=entries))


PARTS = st.sampled_from(["a", "b", "A", "..", ".", "", ".git", "c\n", "\u00e9", "e\u0301", "/"])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
HASHES = st.sampled_from([HASH, HASH.upper(), "", "..", "0" * 64])
ENTRIES = st.builds(
    Entry,
    path=PATHS,
    kind=st.sampled_from(["file", "directory", "link"]),
    mode=st.sampled_from([0, 0o644, 0o755, 0o777]),
    size=st.sampled_from([0, 0, 0, 5]),
    sha256=HASHES,
    target=st.one_of(st.just(""), PATHS),
)


@settings(max_examples=cases(700), deadline=None)
@given(st.lists(ENTRIES, max_size=8), st.booleans())
def test_what_is_passed_writes_nothing_outside(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], mend: bool
) -> None:
    if mend:  # else next to nothing gets past the first rules
        entries = [_mended(entry) for entry in entries]
        entries = sorted({e.path: e for e in entries}.values(), key=lambda e: e.path.split("/"))
    made = Manifest(entries=tuple(entries))
    try:
        passed = decode(encode(made))
    except WorkspaceError:
        return
    top = tmp_path_factory.mktemp("place")
    try:
        place(passed, top / "inside", lambda _entry, _descriptor: None)
    except Corrupted:  # a file that is not empty
        assert list(top.iterdir()) == []
        return
    assert [path.name for path in top.iterdir()] == ["inside"]
    root = os.path.realpath(top / "inside")
    for entry in passed.entries:
        real = os.path.realpath(top / "inside" / entry.path)
        assert os.path.commonpath([root, real]) == root


def _mended(entry: Entry) -> Entry:
    if entry.kind == "link":
        target = entry.target or "a"
        return msgspec.structs.replace(entry, mode=0, size=0, sha256="", target=target)
    if entry.kind == "directory":
        return msgspec.structs.replace(entry, mode=0o755, size=0, sha256="", target="")
    return msgspec.structs.replace(entry, size=0, sha256=HASH, target="")


@settings(max_examples=cases(1500), deadline=None)
@given(st.data())
def test_damaged_bytes_are_a_workspace_error_or_a_sound_manifest(data: st.DataObject) -> None:
    good = encode(Manifest(entries=(folder("a"), file("a/b"), link("c", "a/b"))))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "more"]))
        if how == "flip":
            bad[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del bad[at : at + 8]
        else:
            bad[at:at] = data.draw(st.text(string.printable, max_size=8)).encode()
        if not bad:
            break
    try:
        found = decode(bytes(bad))
    except WorkspaceError:
        return
    manifests.check(found)


def test_what_is_written_is_what_was_asked_for(tmp_path: Path) -> None:
    entries = (folder("a", 0o750), file("a/run", mode=0o555, size=2), link("l", "a/run"))
    digest = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4"
    made = Manifest(
        entries=(entries[0], file("a/run", mode=0o555, size=2, sha256=digest), entries[2])
    )
    place(made, tmp_path / "w", lambda _entry, descriptor: write_all(descriptor, b"hi"))
    assert (tmp_path / "w/l").read_bytes() == b"hi"
    assert (tmp_path / "w/a").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "w/a/run").stat().st_mode & 0o777 == 0o555
    with pytest.raises(WorkspaceError, match="not an empty folder"):
        place(made, tmp_path / "w", lambda _entry, descriptor: write_all(descriptor, b"hi"))
