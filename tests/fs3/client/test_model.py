"""Contents and names of files, by several clients, against a model of POSIX with close-to-open lengths.

Bytes that were written are there for everybody at once; of a file's length an open file knows what was
reported before it was opened, and what it wrote itself. That others cut it an open file learns when it
reports what it wrote, or when it reads where there are no bytes.
"""

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.draws import cases
from tests.fs3.client.conftest import Cluster

from fireflyer.errors import FileError
from fireflyer.fs3.client import Client, File
from fireflyer.fs3.kv import Engine, MemoryEngine, SqliteEngine
from fireflyer.rpc.loop import LoopThread

CHUNK = 4096
CLIENTS = 3
COUNTER = itertools.count()

whos = st.integers(0, CLIENTS - 1)
files = st.tuples(st.sampled_from("pq"), st.sampled_from("ab"))
which = st.integers(0, 1000)
edges = st.integers(0, 5).map(lambda n: n * CHUNK)
offsets = st.one_of(edges, st.integers(0, 5 * CHUNK), st.builds(lambda at: max(0, at - 1), edges))
sizes = st.one_of(st.sampled_from([0, 1, CHUNK, CHUNK + 1, 3 * CHUNK]), st.integers(0, 2 * CHUNK))
modes = st.sampled_from(["rb", "rb+", "wb", "wb+", "ab", "ab+", "xb", "xb+"])


class Node:
    """A file: what was written, which may reach beyond the length that is reported."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.length = 0
        self.cuts = 0

    def put(self, offset: int, data: bytes) -> None:
        self.data.extend(bytes(max(0, offset - len(self.data))))
        self.data[offset : offset + len(data)] = data

    def get(self, offset: int, end: int) -> bytes:
        found = bytes(self.data[offset : max(offset, end)])
        return found + bytes(max(0, end - offset - len(found)))

    def cut(self, length: int) -> None:
        del self.data[length:]
        self.length = length
        self.cuts += 1


class Handle:
    """An open file and what it knows."""

    def __init__(self, file: File, node: Node, mode: str, who: int) -> None:
        self.file, self.node, self.who = file, node, who
        self.reads = "r" in mode or "+" in mode
        self.writes, self.append = mode != "rb", "a" in mode
        self.appends = False  # it is the one that does
        self.end = node.length
        self.position = self.end if self.append else 0
        self.written = 0
        self.cuts = node.cuts  # that it knows of

    def learn(self) -> None:
        """It may have been told of a length that others reported, and of no other."""
        assert self.end <= self.file.size <= max(self.end, self.node.length)
        self.end = self.file.size

    def wrote(self, offset: int, data: bytes) -> None:
        if data:
            end = offset + len(data)
            self.node.put(offset, data)
            self.end, self.written = max(self.end, end), max(self.written, end)

    def report(self) -> None:
        if self.written and self.cuts != self.node.cuts:
            self.adopt()
        self.node.length = max(self.node.length, self.written)
        self.written = 0

    def adopt(self) -> None:
        """What stands was written after the cut."""
        self.cuts = self.node.cuts
        if self.writes:
            self.written = len(self.node.data)
        self.end = max(self.node.length, self.written)

    def has_read(self) -> None:
        """If it met a hole, it knows now of cuts."""
        if self.file._version == self.node.cuts != self.cuts:
            self.adopt()
        self.learn()


class Comparison(RuleBasedStateMachine):
    """The file system and its model side by side."""

    def __init__(self, clients: list[Client]) -> None:
        super().__init__()
        self.clients = clients
        self.root = f"/{next(COUNTER)}"
        for folder in ("", "/p", "/q"):
            clients[0].mkdir(self.root + folder)
        self.names: dict[tuple[str, str], Node] = {}
        self.handles: list[Handle] = []
        self.stamp = 0

    def teardown(self) -> None:
        for handle in self.handles:
            handle.file.close()
            handle.report()
        for at, node in self.names.items():
            with self.clients[0].open(self.path(at)) as file:
                assert file.read() == node.get(0, node.length)

    def path(self, at: tuple[str, str]) -> str:
        return f"{self.root}/{at[0]}/{at[1]}"

    def fresh(self, size: int) -> bytes:
        """Bytes that were not written before."""
        self.stamp += 1
        return (self.stamp.to_bytes(3, "big") * (size // 3 + 1))[:size]

    def pick(self, index: int, *, writes: bool = False) -> Handle | None:
        found = [handle for handle in self.handles if handle.writes or not writes]
        return found[index % len(found)] if found else None

    def may_be_gone(self, of: Handle) -> bool:
        """Without a name, and not open for writing by the client that reads it."""
        sessions = [h for h in self.handles if h.node is of.node and h.writes and h.who == of.who]
        return of.node not in self.names.values() and not sessions

    # Opening and closing.

    @rule(who=whos, at=files, mode=modes)
    def open(self, who: int, at: tuple[str, str], mode: str) -> None:
        node = self.names.get(at)
        kind = mode[0]
        if (node is None and kind == "r") or (node is not None and kind == "x"):
            with pytest.raises(FileNotFoundError if kind == "r" else FileExistsError):
                self.clients[who].open(self.path(at), mode)
            return
        file = self.clients[who].open(self.path(at), mode)
        assert isinstance(file, File)
        if node is None:
            node = self.names[at] = Node()
        elif kind == "w":
            node.cut(0)
        self.handles.append(Handle(file, node, mode, who))
        assert file.size == node.length

    @rule(index=which, sync=st.booleans())
    def report(self, index: int, sync: bool) -> None:
        handle = self.pick(index)
        if handle is None:
            return
        if sync:
            handle.file.fsync()
            handle.report()
            handle.learn()
        else:
            handle.file.close()
            handle.report()
            self.handles.remove(handle)

    # Bytes.

    @rule(index=which, offset=offsets, size=sizes)
    def pwrite(self, index: int, offset: int, size: int) -> None:
        handle = self.pick(index, writes=True)
        if handle is not None:
            data = self.fresh(size)
            assert handle.file.pwrite(data, offset) == size
            handle.wrote(offset, data)
            handle.learn()

    @rule(index=which, size=sizes)
    def write(self, index: int, size: int) -> None:
        handle = self.pick(index, writes=True)
        if handle is None:
            return
        if handle.append and any(h.appends for h in self.handles if h.node is handle.node):
            if not handle.appends:
                with pytest.raises(FileError, match="another open file appends to it"):
                    handle.file.write(b"")
                return
        elif handle.append:
            handle.appends, handle.end = True, max(handle.end, handle.node.length)
        offset, data = handle.end if handle.append else handle.position, self.fresh(size)
        assert handle.file.write(data) == size
        handle.wrote(offset, data)
        handle.learn()
        handle.position = offset + size
        assert handle.file.tell() == handle.position

    @rule(one=which, other=which, offset=offsets, size=sizes)
    def write_many(self, one: int, other: int, offset: int, size: int) -> None:
        first, second = self.pick(one, writes=True), self.pick(other, writes=True)
        if first is None or second is None:
            return
        parts = [(first, offset, self.fresh(size)), (second, offset + size, self.fresh(size))]
        rows = [(handle.file, at, data) for handle, at, data in parts]
        assert self.clients[0].write_many(rows) == 2 * size
        for handle, at, data in parts:
            handle.wrote(at, data)
        for handle, _, _ in parts:
            handle.learn()

    @rule(index=which, offset=offsets, size=sizes, seek=st.booleans())
    def read(self, index: int, offset: int, size: int, seek: bool) -> None:
        handle = self.pick(index)
        if handle is None or not handle.reads:
            return
        if seek:
            assert handle.file.seek(offset) == offset
            handle.position = offset
        try:
            found = handle.file.pread(size, handle.position)
        except FileError as error:
            if error.errno != errno.ESTALE or not self.may_be_gone(handle):
                raise
            return
        handle.has_read()
        expected = handle.node.get(handle.position, min(handle.end, handle.position + size))
        assert found == expected
        assert handle.file.read(size) == expected
        handle.position += len(expected)

    @rule(index=which, back=st.integers(0, CHUNK))
    def seek(self, index: int, back: int) -> None:
        handle = self.pick(index)
        if handle is not None and back <= handle.end:
            handle.position = handle.end - back
            assert handle.file.seek(-back, os.SEEK_END) == handle.position

    @rule(index=which, length=offsets)
    def truncate(self, index: int, length: int) -> None:
        handle = self.pick(index, writes=True)
        if handle is None:
            return
        assert handle.file.truncate(length) == length
        handle.node.cut(length)
        handle.end, handle.written, handle.cuts = length, 0, handle.node.cuts
        assert handle.file.size == length

    @rule(who=whos, at=files, length=offsets)
    def truncate_by_name(self, who: int, at: tuple[str, str], length: int) -> None:
        node = self.names.get(at)
        if node is not None:
            self.clients[who].truncate(self.path(at), length)
            node.cut(length)

    # Names.

    @rule(who=whos, at=files)
    def unlink(self, who: int, at: tuple[str, str]) -> None:
        if at in self.names:
            self.clients[who].unlink(self.path(at))
            del self.names[at]
        else:
            with pytest.raises(FileNotFoundError):
                self.clients[who].unlink(self.path(at))

    @rule(who=whos, at=files, to=files)
    def link(self, who: int, at: tuple[str, str], to: tuple[str, str]) -> None:
        wrong = FileNotFoundError if at not in self.names else FileExistsError
        if at in self.names and to not in self.names:
            self.clients[who].link(self.path(at), self.path(to))
            self.names[to] = self.names[at]
        else:
            with pytest.raises(wrong):
                self.clients[who].link(self.path(at), self.path(to))

    @rule(who=whos, at=files, to=files, how=st.sampled_from(["over", "over", "free", "swap"]))
    def rename(self, who: int, at: tuple[str, str], to: tuple[str, str], how: str) -> None:
        options = {"replace": how != "free", "exchange": how == "swap"}
        wrong: type[OSError] | None = None
        if at not in self.names or (how == "swap" and to not in self.names):
            wrong = FileNotFoundError
        elif how == "free" and to in self.names:
            wrong = FileExistsError
        if wrong is not None:
            with pytest.raises(wrong):
                self.clients[who].rename(self.path(at), self.path(to), **options)
            return
        self.clients[who].rename(self.path(at), self.path(to), **options)
        if how == "swap":
            self.names[at], self.names[to] = self.names[to], self.names[at]
        elif self.names.get(to) is not self.names[at]:  # two names of one file stay
            self.names[to] = self.names.pop(at)

    @rule(who=whos)
    def swap_directories(self, who: int) -> None:
        self.clients[who].rename(f"{self.root}/p", f"{self.root}/q", exchange=True)
        turned = {"p": "q", "q": "p"}
        self.names = {(turned[folder], name): node for (folder, name), node in self.names.items()}

    @rule(who=whos, at=files)
    def look(self, who: int, at: tuple[str, str]) -> None:
        """Who opens a file now has all that was reported."""
        if at in self.names:
            node = self.names[at]
            with self.clients[who].open(self.path(at)) as file:
                assert file.read() == node.get(0, node.length)

    @invariant()
    def names_and_lengths_are_the_models(self) -> None:
        fs = self.clients[self.stamp % CLIENTS]
        for folder in "pq":
            listed = fs.listdir(f"{self.root}/{folder}")
            assert listed == sorted(name for above, name in self.names if above == folder)
        found = fs.stat_many([self.path(at) for at in self.names])
        for node, status in zip(self.names.values(), found, strict=True):
            assert isinstance(status, os.stat_result)
            assert status.st_size == node.length
            assert status.st_nlink == sum(other is node for other in self.names.values())


@pytest.fixture(params=["memory", "sqlite"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Client]]:
    """Of a file system of small chunks."""
    memory = request.param == "memory"
    engine: Engine = MemoryEngine() if memory else SqliteEngine(tmp_path / "meta.sqlite")
    with LoopThread("manager") as loop:
        cluster = Cluster(loop, tmp_path, nodes=2, replicas=2, engine=engine, chunk=CHUNK)
        made = [cluster.connect() for _ in range(CLIENTS)]
        yield made
        for client in made:
            client.close()
        cluster.close()


@pytest.mark.sample(1, 1)
def test_contents_and_names_are_those_of_the_model(clients: list[Client]) -> None:
    run_state_machine_as_test(
        cast(Any, lambda: Comparison(clients)),
        settings=settings(
            max_examples=cases(120),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
