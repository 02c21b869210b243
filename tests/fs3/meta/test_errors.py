"""The error numbers of POSIX, case by case, and limits."""

import errno as e
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fireflyer.errors import FileError, FireflyerError
from fireflyer.fs3.kv import Engine, MemoryEngine, SqliteEngine, Transaction, run
from fireflyer.fs3.meta import Inode, Layout, MetaService, Request, User
from fireflyer.fs3.meta import messages as m
from fireflyer.fs3.meta.context import Context
from fireflyer.fs3.meta.directories import make_directory
from fireflyer.fs3.meta.inode import BLOCK_DEVICE, CHARACTER_DEVICE, FIFO, SOCKET

ROOT, ALICE, BOB = User(0, 0), User(1, 10), User(2, 10, (20,))
Ask = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ask]:
    """ask(call, user=ROOT) on a file system with a few things in it."""
    engine: Engine = (
        MemoryEngine() if request.param == "memory" else SqliteEngine(tmp_path / "m.sqlite")
    )
    service = MetaService(engine, now=lambda: 10**18)

    def ask(call: Any, user: User = ROOT, client: int = 1) -> Any:
        return service.execute(Request(user, client, call))

    ask(m.MakeDirectory(1, b"d", 0o755))
    ask(m.MakeDirectory(1, b"d/sub"))
    ask(m.MakeDirectory(1, b"empty"))
    ask(m.MakeDirectory(1, b"private", 0o700))
    ask(m.MakeDirectory(1, b"tmp", 0o1777))
    ask(m.Create(1, b"f"))
    ask(m.Create(1, b"d/f"))
    ask(m.Create(1, b"tmp/alice", 0o666), ALICE)
    ask(m.Symlink(1, b"loop", b"loop"))
    ask(m.Symlink(1, b"to-d", b"/d"))
    ask(m.Symlink(1, b"nowhere", b"nothing"))
    ask(m.MakeNode(1, b"fifo", FIFO, 0o666))
    yield ask
    engine.close()


LONG = b"n" * 256
CASES: list[tuple[str, m.Call, User, int]] = [
    ("a directory into itself", m.Rename(1, b"d", 1, b"d/sub/x"), ROOT, e.EINVAL),
    ("a directory onto its child", m.Rename(1, b"d", 1, b"d/sub"), ROOT, e.EINVAL),
    ("a directory onto its parent", m.Rename(1, b"d/sub", 1, b"d"), ROOT, e.ENOTEMPTY),
    ("exchange with an ancestor", m.Rename(1, b"d/sub", 1, b"d", 2), ROOT, e.EINVAL),
    ("a file onto a directory", m.Rename(1, b"f", 1, b"empty"), ROOT, e.EISDIR),
    ("a directory onto a file", m.Rename(1, b"empty", 1, b"f"), ROOT, e.ENOTDIR),
    ("onto a full directory", m.Rename(1, b"empty", 1, b"d"), ROOT, e.ENOTEMPTY),
    ("rename of dot", m.Rename(1, b"d/.", 1, b"x"), ROOT, e.EINVAL),
    ("rename of nothing", m.Rename(1, b"none", 1, b"x"), ROOT, e.ENOENT),
    ("rename to a file's child", m.Rename(1, b"d", 1, b"f/x"), ROOT, e.ENOTDIR),
    ("rename of a file to a slash", m.Rename(1, b"f", 1, b"x/"), ROOT, e.ENOTDIR),
    ("rename of a file with a slash", m.Rename(1, b"f/", 1, b"x"), ROOT, e.ENOTDIR),
    ("noreplace", m.Rename(1, b"f", 1, b"d/f", 1), ROOT, e.EEXIST),
    ("exchange with nothing", m.Rename(1, b"f", 1, b"x", 2), ROOT, e.ENOENT),
    ("both flags", m.Rename(1, b"f", 1, b"x", 3), ROOT, e.EINVAL),
    ("rename in a sticky directory", m.Rename(1, b"tmp/alice", 1, b"tmp/x"), BOB, e.EPERM),
    ("rename without permission", m.Rename(1, b"f", 1, b"g"), ALICE, e.EACCES),
    ("rmdir of a full one", m.RemoveDirectory(1, b"d"), ROOT, e.ENOTEMPTY),
    ("rmdir of a file", m.RemoveDirectory(1, b"f"), ROOT, e.ENOTDIR),
    ("rmdir through a symlink", m.RemoveDirectory(1, b"to-d"), ROOT, e.ENOTDIR),
    ("rmdir of dot", m.RemoveDirectory(1, b"empty/."), ROOT, e.EINVAL),
    ("rmdir of dot-dot", m.RemoveDirectory(1, b"empty/.."), ROOT, e.ENOTEMPTY),
    ("rmdir of the root", m.RemoveDirectory(1, b"/"), ROOT, e.EBUSY),
    ("rmdir of nothing", m.RemoveDirectory(1, b"none"), ROOT, e.ENOENT),
    ("unlink of a directory", m.Unlink(1, b"empty"), ROOT, e.EISDIR),
    ("unlink of nothing", m.Unlink(1, b"none"), ROOT, e.ENOENT),
    ("unlink of an empty path", m.Unlink(1, b""), ROOT, e.ENOENT),
    ("unlink of a file with a slash", m.Unlink(1, b"f/"), ROOT, e.ENOTDIR),
    ("unlink in a sticky directory", m.Unlink(1, b"tmp/alice"), BOB, e.EPERM),
    ("a loop of symlinks", m.Stat(1, b"loop"), ROOT, e.ELOOP),
    ("a loop on the way", m.Stat(1, b"loop/x"), ROOT, e.ELOOP),
    ("open of a symlink, not followed", m.Open(1, b"to-d", follow=False), ROOT, e.ELOOP),
    ("create through a loop", m.Create(1, b"loop"), ROOT, e.ELOOP),
    ("a dangling symlink", m.Stat(1, b"nowhere"), ROOT, e.ENOENT),
    ("mkdir over a dangling symlink", m.MakeDirectory(1, b"nowhere"), ROOT, e.EEXIST),
    ("a file on the way", m.Stat(1, b"f/x"), ROOT, e.ENOTDIR),
    ("a slash behind a file", m.Stat(1, b"f/"), ROOT, e.ENOTDIR),
    ("a name of 256 bytes", m.Create(1, LONG), ROOT, e.ENAMETOOLONG),
    ("one on the way", m.Stat(1, LONG + b"/x"), ROOT, e.ENAMETOOLONG),
    ("a path of 4097 bytes", m.Stat(1, b"/" * 4097), ROOT, e.ENAMETOOLONG),
    ("a target of 4096 bytes", m.Symlink(1, b"s", b"x" * 4096), ROOT, e.ENAMETOOLONG),
    ("an empty target", m.Symlink(1, b"s", b""), ROOT, e.ENOENT),
    ("mknod of a directory", m.MakeNode(1, b"x", 2), ROOT, e.EINVAL),
    ("mknod of a device", m.MakeNode(1, b"tmp/x", BLOCK_DEVICE, 0o644, 1), ALICE, e.EPERM),
    ("mknod over a file", m.MakeNode(1, b"f", FIFO), ROOT, e.EEXIST),
    ("open of a fifo", m.Open(1, b"fifo", handle=1), ROOT, e.ENXIO),
    ("create over a fifo", m.Create(1, b"fifo"), ROOT, e.ENXIO),
    ("truncation of a fifo", m.Truncate(1, b"fifo", 0), ROOT, e.EINVAL),
    ("the layout of a fifo", m.SetLayout(1, b"fifo", Layout(1, 1, 4096, 4)), ROOT, e.EINVAL),
    ("an attribute of a fifo", m.SetXattr(1, b"fifo", b"user.n", b""), ROOT, e.EPERM),
    ("NUL in a name", m.Create(1, b"a\0b"), ROOT, e.EINVAL),
    ("an empty name", m.Create(1, b""), ROOT, e.ENOENT),
    ("a way out of the root", m.Stat(1, b"../../../none"), ROOT, e.ENOENT),
    ("a name of 256 bytes behind dots", m.Create(1, b"../d/../" + LONG), ROOT, e.ENAMETOOLONG),
    ("a way up through a file", m.Create(1, b"f/../x"), ROOT, e.ENOTDIR),
    ("create of dot", m.Create(1, b"."), ROOT, e.EISDIR),
    ("create of a directory", m.Create(1, b"d", handle=1), ROOT, e.EISDIR),
    ("create with a slash", m.Create(1, b"new/"), ROOT, e.EISDIR),
    ("exclusive create over a symlink", m.Create(1, b"nowhere", exclusive=True), ROOT, e.EEXIST),
    ("create in nothing", m.Create(1, b"none/x"), ROOT, e.ENOENT),
    ("create without permission", m.Create(1, b"x"), ALICE, e.EACCES),
    ("search without permission", m.Stat(1, b"private/x"), ALICE, e.EACCES),
    ("list without permission", m.ReadDirectory(1, b"private"), ALICE, e.EACCES),
    ("list of a file", m.ReadDirectory(1, b"f"), ROOT, e.ENOTDIR),
    ("mkdir of what is there", m.MakeDirectory(1, b"f"), ROOT, e.EEXIST),
    ("mkdir of the root", m.MakeDirectory(1, b"/"), ROOT, e.EEXIST),
    ("mkdir of dot", m.MakeDirectory(1, b"d/."), ROOT, e.EEXIST),
    ("link of a directory", m.Link(1, b"d", 1, b"x"), ROOT, e.EPERM),
    ("link over a name", m.Link(1, b"f", 1, b"d/f"), ROOT, e.EEXIST),
    ("link to a slash", m.Link(1, b"f", 1, b"x/"), ROOT, e.ENOENT),
    ("open of a directory for writing", m.Open(1, b"d", handle=1), ROOT, e.EISDIR),
    ("open for writing, not allowed", m.Open(1, b"f", handle=1), ALICE, e.EACCES),
    ("open of nothing", m.Open(1, b"none"), ROOT, e.ENOENT),
    ("a number that is no inode", m.Stat(10**9), ROOT, e.ENOENT),
    ("truncate of a directory", m.Truncate(1, b"d", 0), ROOT, e.EISDIR),
    ("truncate to less than nothing", m.Truncate(1, b"f", -5), ROOT, e.EINVAL),
    ("truncate to too much", m.Truncate(1, b"f", 1 << 63), ROOT, e.EFBIG),
    ("truncate by an unknown handle", m.Truncate(1, b"", 0, 7), ROOT, e.EBADF),
    ("truncate without permission", m.Truncate(1, b"f", 0), ALICE, e.EACCES),
    ("close of what is not open", m.Close(1, 7), ROOT, e.EBADF),
    ("chmod of another's file", m.ChangeMode(1, b"f", 0o777), ALICE, e.EPERM),
    ("chmod of a symlink", m.ChangeMode(1, b"loop", 0, follow=False), ROOT, e.EOPNOTSUPP),
    ("giving a file away", m.ChangeOwner(1, b"tmp/alice", 2), ALICE, e.EPERM),
    ("a group that one is not in", m.ChangeOwner(1, b"tmp/alice", gid=20), ALICE, e.EPERM),
    ("an owner that is no number", m.ChangeOwner(1, b"f", 1 << 32), ROOT, e.EINVAL),
    ("all or none", m.SetAttributes(2, m.Changes(mode=0o777, uid=1 << 32)), ROOT, e.EINVAL),
    ("attributes of what is not open", m.SetAttributes(2, m.Changes(), 7), ROOT, e.EBADF),
    ("another's times", m.SetTimes(1, b"tmp/alice", 1, 1), BOB, e.EPERM),
    ("another's times to now", m.SetTimes(1, b"f"), ALICE, e.EACCES),
    ("readlink of a file", m.ReadLink(1, b"f"), ROOT, e.EINVAL),
    ("no such attribute", m.GetXattr(1, b"f", b"user.none"), ROOT, e.ENODATA),
    ("replace of no attribute", m.SetXattr(1, b"f", b"user.n", b"", 2), ROOT, e.ENODATA),
    ("another namespace", m.SetXattr(1, b"f", b"other.n", b""), ROOT, e.EOPNOTSUPP),
    ("a large attribute", m.SetXattr(1, b"f", b"user.n", bytes(65537)), ROOT, e.E2BIG),
    ("a long attribute", m.SetXattr(1, b"f", b"user." + LONG, b""), ROOT, e.ERANGE),
    ("trusted by others", m.SetXattr(1, b"tmp/alice", b"trusted.n", b""), ALICE, e.EPERM),
    ("of a symlink", m.SetXattr(1, b"loop", b"user.n", b"", 0, False), ROOT, e.EPERM),
    ("removal of no attribute", m.RemoveXattr(1, b"f", b"user.n"), ROOT, e.ENODATA),
    ("a chunk size", m.SetLayout(1, b"d", Layout(1, 1, 5000, 4)), ROOT, e.EINVAL),
    ("a stripe", m.SetLayout(1, b"d", Layout(1, 1, 1 << 20, 0)), ROOT, e.EINVAL),
    ("another's layout", m.SetLayout(1, b"d", Layout(1, 1, 1 << 20, 4)), ALICE, e.EPERM),
    ("names, by others", m.Names(1), ALICE, e.EPERM),
    ("expiry, by others", m.Expire(0), ALICE, e.EPERM),
    ("collection, by others", m.Collect(), ALICE, e.EPERM),
    ("its end, by others", m.Collected([2]), ALICE, e.EPERM),
    ("settling, by others", m.Settle(2, 1, 0, 0, 0), ALICE, e.EPERM),
]


@pytest.mark.sample(121)
@pytest.mark.parametrize(
    ("call", "user", "number"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_number(ask: Ask, call: m.Call, user: User, number: int) -> None:
    before = tree(ask)
    with pytest.raises(FireflyerError) as caught:
        ask(call, user)
    assert isinstance(caught.value, FileError)
    assert caught.value.errno == number, os.strerror(caught.value.errno or 0)
    assert tree(ask) == before


def tree(ask: Ask) -> list[Inode]:
    found: list[Inode] = []
    left = [1]
    while left:
        listing = ask(m.ReadDirectory(left.pop(), plus=True))
        found += listing.inodes
        left += [inode.number for inode in listing.inodes if inode.kind == 2]
    return found


def test_python_knows_the_errors_by_its_own_classes(ask: Ask) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        ask(m.Stat(1, b"none"))
    with pytest.raises(FileExistsError):
        ask(m.MakeDirectory(1, b"d"))
    with pytest.raises(PermissionError):
        ask(m.Create(1, b"x"), ALICE)
    with pytest.raises(IsADirectoryError):
        ask(m.Unlink(1, b"d"))
    with pytest.raises(NotADirectoryError):
        ask(m.Stat(1, b"f/x"))
    with pytest.raises(OSError, match="not empty"):
        ask(m.RemoveDirectory(1, b"d"))


def test_special_files_have_names_and_attributes_but_no_bytes(ask: Ask) -> None:
    made = ask(m.MakeNode(1, b"tmp/socket", SOCKET, 0o600, 77), ALICE)
    assert (made.kind, made.device, made.uid, made.length, made.layout) == (SOCKET, 0, 1, 0, None)
    assert ask(m.MakeNode(1, b"null", CHARACTER_DEVICE, 0o666, 259)).device == 259
    ask(m.Link(1, b"null", 1, b"d/other"))
    ask(m.Unlink(1, b"null"))
    assert ask(m.Stat(1, b"d/other")).nlink == 1
    before = ask(m.Statfs())
    ask(m.Unlink(1, b"d/other"))
    after = ask(m.Statfs())
    assert (after.files, after.unlinked) == (before.files - 1, before.unlinked)


def test_only_who_may_write_a_directory_gives_it_another_parent(ask: Ask) -> None:
    ask(m.MakeDirectory(1, b"open", 0o777))
    ask(m.MakeDirectory(1, b"open/theirs", 0o755))
    ask(m.MakeDirectory(1, b"open/to", 0o777))
    with pytest.raises(PermissionError):
        ask(m.Rename(1, b"open/theirs", 1, b"open/to/x"), ALICE)
    ask(m.Rename(1, b"open/theirs", 1, b"open/renamed"), ALICE)


def test_chmod_by_who_is_not_in_the_group_takes_setgid(ask: Ask) -> None:
    ask(m.ChangeOwner(1, b"tmp/alice", gid=20))
    assert ask(m.ChangeMode(1, b"tmp/alice", 0o6755), ALICE).mode == 0o4755
    assert ask(m.ChangeMode(1, b"tmp/alice", 0o6755)).mode == 0o6755


def test_longest_names_and_paths_work(ask: Ask) -> None:
    name = b"n" * 255
    number = ask(m.Create(1, name)).number
    assert ask(m.Stat(1, name)).number == number
    assert ask(m.Stat(1, b"/" * (4096 - 255) + name)).number == number
    for at in range(40):
        ask(m.Symlink(1, b"l%d" % at, b"l%d" % (at - 1) if at else name))
    assert ask(m.Stat(1, b"l39")).number == number
    ask(m.Symlink(1, b"l40", b"l39"))
    with pytest.raises(FileError) as caught:
        ask(m.Stat(1, b"l40"))
    assert caught.value.errno == e.ELOOP


def test_paths_go_up_and_through_symlinks(ask: Ask) -> None:
    d = ask(m.Stat(1, b"d")).number
    assert ask(m.Stat(d, b"..")).number == 1
    assert ask(m.Stat(1, b"/../d/sub/../../to-d/.")).number == d
    assert ask(m.Stat(1, b"to-d")).number == d
    assert ask(m.Stat(1, b"to-d", follow=False)).kind == 3
    assert ask(m.Stat(1, b"to-d/", follow=False)).number == d
    assert ask(m.Create(1, b"nowhere")).number == ask(m.Stat(1, b"nothing")).number


@pytest.mark.parametrize("user", [ROOT, ALICE], ids=["root", "alice"])
def test_many_are_looked_at_as_each_alone(ask: Ask, user: User) -> None:
    ask(m.MakeDirectory(1, b"private/sub"))
    ask(m.Create(1, b"private/f"))
    ask(m.Symlink(1, b"d/up", b".."))
    inner = ask(m.Stat(1, b"d")).number
    names = [b"", b".", b"..", b"f", b"d", b"to-d", b"loop", b"nowhere", b"private", b"sub", b"up"]
    names += [LONG, b"a\0b", b"none", b"x" * 4096]
    paths = [*names, *(a + b"/" + b for a in names for b in names)]
    paths += [b"/" + path for path in paths] + [b"d/up/" + path for path in paths]
    targets = [(start, path) for start in (1, inner, 10**9) for path in paths]

    def alone(start: int, path: bytes) -> Inode | int:
        try:
            found = ask(m.Stat(start, path, False), user)
            assert isinstance(found, Inode)
            return found
        except FileError as error:
            return error.errno or 0

    assert ask(m.StatMany(targets), user).items == [alone(*target) for target in targets]


@pytest.mark.full
def test_forty_thousand_levels_by_handles() -> None:
    engine = MemoryEngine()
    service = MetaService(engine)
    levels, at_once, first = 40_000, 4_000, 1 << 40

    def ask(call: Any) -> Any:
        return service.execute(Request(ROOT, 1, call))

    def deeper(t: Transaction) -> None:
        """`at_once` levels below the last one, each made as the service makes it."""
        context = Context(ROOT, 1, 10**18, {})
        context.number = first + len(numbers) - 1
        below = numbers[-1]
        for _ in range(at_once):
            below = make_directory(t, context, m.MakeDirectory(below, b"d")).number
            numbers.append(below)

    numbers = [1]
    for _ in range(levels // at_once):
        run(engine, deeper)
    bottom = numbers[-1]
    ask(m.Create(bottom, b"leaf"))
    assert ask(m.Stat(bottom, b"..")).number == numbers[-2]
    for below in (bottom, numbers[levels // 2]):
        with pytest.raises(FileError) as caught:
            ask(m.Rename(1, b"d", below, b"loop"))
        assert caught.value.errno == e.EINVAL
    leaf = ask(m.Stat(bottom, b"leaf")).number
    assert ask(m.Names(leaf)).items == [b"/d" * levels + b"/leaf"]
    ask(m.Rename(numbers[2], b"d", 1, b"moved"))
    assert ask(m.Names(leaf)).items == [b"/moved" + b"/d" * (levels - 3) + b"/leaf"]
    with pytest.raises(FileError) as caught:
        ask(m.Rename(1, b"moved", bottom, b"loop"))
    assert caught.value.errno == e.EINVAL
    ask(m.Rename(bottom, b"leaf", 1, b"leaf"))
    for number in reversed(numbers[-200:-1]):
        ask(m.RemoveDirectory(number, b"d"))
    with pytest.raises(FileNotFoundError):
        ask(m.Stat(bottom))
    assert ask(m.Statfs()).files == levels + 2 - 199
