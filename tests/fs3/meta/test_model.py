"""All operations, by several users, against a model of POSIX; on every engine, injured or not."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.draws import cases
from tests.fs3.meta.posix_model import File, Folder, Model, Node, Sym, Wrong

from fireflyer.errors import FileError
from fireflyer.fs3.kv import Engine, MemoryEngine, SqliteEngine
from fireflyer.fs3.meta import Inode, MetaService, Request, User
from fireflyer.fs3.meta import messages as m

USERS = [User(0, 0), User(1, 10), User(2, 10, (20,)), User(3, 30, (20, 10))]
CLIENT = 9

users = st.sampled_from(USERS)
names = st.sampled_from([b"a", b"b", b"c"])
paths = st.one_of(
    names,
    st.lists(st.sampled_from([b"a", b"b", b"c", b".."]), min_size=2, max_size=4).map(b"/".join),
)
modes = st.sampled_from([0o777, 0o755, 0o700, 0o070, 0o1777, 0o2775, 0o6755, 0o311, 0o555])
indexes = st.integers(0, 10_000)


class Comparison(RuleBasedStateMachine):
    """Model and service side by side; `known` pairs every node with its inode's number."""

    def engine(self) -> Engine:
        return MemoryEngine()

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.kv = self.engine()
        self.service = MetaService(self.kv, now=lambda: self.model.now)
        self.number = 0
        self.known: dict[Node, int] = {self.model.root: 1}
        self.handles: dict[int, Node] = {}
        self.next_handle = 1
        self.ask(USERS[0], m.ChangeMode(1, b"", 0o777))
        self.furnish()

    def teardown(self) -> None:
        self.kv.close()

    def furnish(self) -> None:
        """A sticky directory, one with setgid, nested ones of others, files and a symlink in them."""
        root, one, two, three = USERS
        for user, path, mode in (
            (root, b"a", 0o1777),
            (one, b"a/b", 0o777),
            (one, b"a/b/c", 0o755),
            (two, b"b", 0o2777),
            (three, b"b/a", 0o1777),
        ):
            call = m.MakeDirectory(1, path, mode)
            self.both(user, call, partial(self.model.mkdir, user, self.model.root, path, mode))
        for user, path in ((one, b"a/c"), (two, b"a/a"), (one, b"b/c"), (two, b"b/a/b")):
            make = partial(self.model.create, user, self.model.root, path, 0o666, True, 0)
            self.both(user, m.Create(1, path, 0o666, True), make)
        link = partial(self.model.symlink, one, self.model.root, b"c", b"a/b")
        self.both(one, m.Symlink(1, b"c", b"a/b"), link)

    def ask(self, user: User, call: Any) -> Any:
        self.number += 1
        self.model.now += 1000
        request = Request(user, CLIENT, call, self.number, self.number - 1)
        answer = self.service.execute(request)
        if not isinstance(call, m.Stat | m.ReadDirectory | m.Names | m.Statfs):
            again = self.service.execute(request)  # sent again: the same answer, done once
            assert again == answer
        return answer

    def both(self, user: User, call: Any, expected: Callable[[], Node | None]) -> None:
        """Does it in both; the same success, or an error that the model allows."""
        self.model.now += 1000
        try:
            node = expected()
            wrong: set[int] = set()
        except Wrong as error:
            node, wrong = None, error.numbers
        self.model.now -= 1000
        failed, answer = 0, None
        try:
            answer = self.ask(user, call)
        except FileError as error:
            failed = error.errno or -1
        assert failed in wrong if wrong else not failed, (call, failed, wrong)
        if isinstance(node, Node) and isinstance(answer, Inode):
            assert self.known.setdefault(node, answer.number) == answer.number

    def folder(self, index: int) -> Folder:
        folders = [node for node in self.known if isinstance(node, Folder) and node.nlink]
        return folders[index % len(folders)]

    # Making.

    @rule(u=users, at=indexes, path=paths, mode=modes, exclusive=st.booleans(), hold=st.booleans())
    def create(self, u: User, at: int, path: bytes, mode: int, exclusive: bool, hold: bool) -> None:
        start = self.folder(at)
        handle = self.next_handle if hold else 0
        self.next_handle += 1

        def expected() -> Node:
            node = self.model.create(u, start, path, mode, exclusive, handle)
            if handle:
                self.handles[handle] = node
            return node

        self.both(u, m.Create(self.known[start], path, mode, exclusive, handle), expected)

    @rule(u=users, at=indexes, path=paths)
    def open(self, u: User, at: int, path: bytes) -> None:
        start, handle = self.folder(at), self.next_handle
        self.next_handle += 1

        def expected() -> Node:
            node = self.model.open(u, start, path, handle)
            self.handles[handle] = node
            return node

        self.both(u, m.Open(self.known[start], path, False, handle), expected)

    @rule(u=users, at=indexes, path=paths, mode=modes)
    def mkdir(self, u: User, at: int, path: bytes, mode: int) -> None:
        start = self.folder(at)
        call = m.MakeDirectory(self.known[start], path, mode)
        self.both(u, call, lambda: self.model.mkdir(u, start, path, mode))

    @rule(u=users, at=indexes, path=paths, leads=paths)
    def symlink(self, u: User, at: int, path: bytes, leads: bytes) -> None:
        start = self.folder(at)
        call = m.Symlink(self.known[start], path, leads)
        self.both(u, call, lambda: self.model.symlink(u, start, path, leads))

    @rule(u=users, at=indexes, path=paths, to=indexes, new=paths)
    def link(self, u: User, at: int, path: bytes, to: int, new: bytes) -> None:
        start, end = self.folder(at), self.folder(to)
        call = m.Link(self.known[start], path, self.known[end], new)
        self.both(u, call, lambda: self.model.link(u, start, path, end, new))

    # Removing, moving.

    @rule(u=users, at=indexes, path=paths, directory=st.booleans())
    def remove(self, u: User, at: int, path: bytes, directory: bool) -> None:
        start = self.folder(at)
        kind = m.RemoveDirectory if directory else m.Unlink
        call = kind(self.known[start], path)
        self.both(u, call, lambda: self.model.remove(u, start, path, directory))

    @rule(
        u=users, at=indexes, path=paths, to=indexes, new=paths, flags=st.sampled_from([0, 0, 1, 2])
    )
    def rename(self, u: User, at: int, path: bytes, to: int, new: bytes, flags: int) -> None:
        start, end = self.folder(at), self.folder(to)
        call = m.Rename(self.known[start], path, self.known[end], new, flags)
        self.both(u, call, lambda: self.model.rename(u, start, path, end, new, flags))

    # Attributes.

    @rule(u=users, at=indexes, path=paths, mode=modes)
    def chmod(self, u: User, at: int, path: bytes, mode: int) -> None:
        start = self.folder(at)
        call = m.ChangeMode(self.known[start], path, mode)
        self.both(u, call, lambda: self.model.chmod(u, start, path, mode))

    @rule(
        u=users,
        at=indexes,
        path=paths,
        uid=st.sampled_from([-1, 0, 1, 2]),
        gid=st.sampled_from([-1, 10, 20]),
    )
    def chown(self, u: User, at: int, path: bytes, uid: int, gid: int) -> None:
        start = self.folder(at)
        call = m.ChangeOwner(self.known[start], path, uid, gid, follow=False)
        self.both(u, call, lambda: self.model.chown(u, start, path, uid, gid))

    @rule(u=users, at=indexes, path=paths, mtime=st.integers(0, 1 << 60))
    def utimens(self, u: User, at: int, path: bytes, mtime: int) -> None:
        start = self.folder(at)
        call = m.SetTimes(self.known[start], path, m.OMIT, mtime)
        self.both(u, call, lambda: self.model.utimens(u, start, path, mtime))

    @rule(u=users, at=indexes, path=paths, length=st.integers(0, 1 << 40))
    def truncate(self, u: User, at: int, path: bytes, length: int) -> None:
        start = self.folder(at)
        call = m.Truncate(self.known[start], path, length)
        self.both(u, call, lambda: self.model.truncate(u, start, path, length))

    @rule(
        u=users,
        at=indexes,
        path=paths,
        value=st.binary(max_size=3),
        flags=st.sampled_from([0, 1, 2]),
    )
    def set_xattr(self, u: User, at: int, path: bytes, value: bytes, flags: int) -> None:
        start = self.folder(at)
        call = m.SetXattr(self.known[start], path, b"user.x", value, flags)
        self.both(u, call, lambda: self.model.set_xattr(u, start, path, value, flags))

    # Open files.

    @precondition(lambda self: self.handles)
    @rule(which=indexes, length=st.integers(0, 1 << 40), late=st.booleans(), end=st.booleans())
    def report(self, which: int, length: int, late: bool, end: bool) -> None:
        handle = sorted(self.handles)[which % len(self.handles)]
        node = self.handles[handle]
        version = node.version - late
        kind = m.Close if end else m.ReportLength
        call = kind(self.known[node], handle, length, version)

        def expected() -> Node:
            self.model.report(USERS[1], node, length, version)
            return node

        self.both(USERS[1], call, expected)
        if end and not late:  # after a length that is not accepted the file stays open
            node.writers.discard(handle)
            del self.handles[handle]

    @rule()
    def collect(self) -> None:
        """The collector is told of the files without name and writer, exactly."""
        removals = self.ask(USERS[0], m.Collect(limit=10_000)).items
        gone = {
            number: node
            for node, number in self.known.items()
            if isinstance(node, File) and node.nlink == 0 and not node.writers
        }
        assert {removal.inode for removal in removals} == set(gone)
        self.ask(USERS[0], m.Collected(sorted(gone)))
        for node in gone.values():
            del self.known[node]

    # What must be equal.

    @invariant()
    def same_tree(self) -> None:
        root = USERS[0]
        left: list[tuple[Folder, list[bytes]]] = [(self.model.root, [])]
        paths: dict[Node, set[bytes]] = {}
        while left:
            folder, way = left.pop()
            listing = self.ask(root, m.ReadDirectory(self.known[folder], plus=True))
            assert [name for name, _, _ in listing.entries] == sorted(folder.names)
            for (name, number, _), inode in zip(listing.entries, listing.inodes, strict=True):
                node = folder.names[name]
                assert self.known[node] == number == inode.number
                self.same(node, inode)
                paths.setdefault(node, set()).add(b"/" + b"/".join([*way, name]))
                if isinstance(node, Folder):
                    left.append((node, [*way, name]))
        for node, wanted in paths.items():
            assert set(self.ask(root, m.Names(self.known[node])).items) == wanted
        for node in self.handles.values():
            self.same(node, self.ask(root, m.Stat(self.known[node])))
        assert self.ask(root, m.Statfs()).files == self.model.files

    def same(self, node: Node, inode: Inode) -> None:
        assert inode.kind == {File: 1, Folder: 2, Sym: 3}[type(node)]
        found = (inode.mode, inode.uid, inode.gid, inode.nlink, inode.length, inode.mtime)
        assert found == (node.mode, node.uid, node.gid, node.nlink, node.length, node.mtime)
        assert inode.ctime <= self.model.now
        if isinstance(node, Sym):
            assert inode.target == node.target


class Injured(Comparison):
    def engine(self) -> Engine:
        return MemoryEngine(5, conflicts=0.2, maybe=0.2)


class OnDisk(Comparison):
    def engine(self) -> Engine:
        memory = Path("/dev/shm")  # what a power cut would leave is not this test's subject
        self.place = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        return SqliteEngine(Path(self.place.name) / "kv.sqlite")

    def teardown(self) -> None:
        super().teardown()
        self.place.cleanup()


SETTINGS = settings(
    max_examples=cases(120),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestMemory = cast(Any, Comparison).TestCase
TestMemory.settings = SETTINGS
TestInjured = cast(Any, Injured).TestCase
TestInjured.settings = SETTINGS
TestSqlite = cast(Any, OnDisk).TestCase
TestSqlite.settings = settings(SETTINGS, max_examples=cases(40))
