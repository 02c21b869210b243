"""Sessions, orphans, expiry, stripes, layouts, batches, idempotency: what the service promises over time."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import fork_child

from fireflyer.errors import FileError, FireflyerError, ProtocolMismatch
from fireflyer.fs3.kv import Engine, MemoryEngine, SqliteEngine
from fireflyer.fs3.meta import Inode, Layout, MetaService, Request, User
from fireflyer.fs3.meta import messages as m

ROOT = User(0, 0)
S = 10**9


class Cluster:
    """A service with a clock of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 10**18
        self.service = MetaService(engine, now=lambda: self.now)

    def ask(self, call: Any, client: int = 1, number: int = 0, acknowledged: int = 0) -> Any:
        return self.service.execute(Request(ROOT, client, call, number, acknowledged))

    def rows(self, prefix: bytes) -> int:
        t = self.engine.begin()
        found = len(t.snapshot_range(prefix, bytes([prefix[0] + 1])))
        t.end()
        return found

    def everything(self) -> set[bytes]:
        """All keys."""
        t = self.engine.begin()
        found = {key for key, _ in t.snapshot_range(b"", b"\xff")}
        t.end()
        return found


@pytest.fixture(params=["memory", "injured", "sqlite"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    engine: Engine
    if request.param == "sqlite":
        engine = SqliteEngine(tmp_path / "m.sqlite")
    else:
        engine = MemoryEngine(3, conflicts=0.3 if request.param == "injured" else 0.0)
    yield Cluster(engine)
    engine.close()


def test_who_only_reads_leaves_nothing(cluster: Cluster) -> None:
    """So that a store without space can be read."""
    cluster.ask(m.Create(1, b"f"), client=0)
    before = cluster.everything()
    cluster.ask(m.Open(1, b"f"), client=7)
    cluster.ask(m.Stat(1, b"f"), client=7)
    assert cluster.everything() == before
    cluster.ask(m.Open(1, b"f", handle=6), client=7)
    assert (cluster.rows(b"S"), cluster.rows(b"C")) == (1, 1)


def test_an_unlinked_file_stays_while_it_is_written(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=5))
    cluster.ask(m.Open(1, b"f", handle=6), client=2)
    cluster.ask(m.Unlink(1, b"f"))
    assert cluster.ask(m.Stat(inode.number)).nlink == 0
    with pytest.raises(FileNotFoundError):
        cluster.ask(m.Open(inode.number, handle=9))
    assert cluster.ask(m.Collect()).items == []
    assert cluster.ask(m.Close(inode.number, 5, 77, 0)).length == 77
    cluster.ask(m.Collected([inode.number]))  # told too early: passed over
    assert cluster.ask(m.Stat(inode.number)).length == 77
    cluster.ask(m.Close(inode.number, 6), client=2)
    (removal,) = cluster.ask(m.Collect()).items
    assert (removal.inode, removal.chains, removal.layout) == (inode.number, 1, inode.layout)
    assert cluster.ask(m.Collect(after=inode.number)).items == []
    cluster.ask(m.Collected([inode.number]))
    cluster.ask(m.Collected([inode.number]))
    with pytest.raises(FileNotFoundError):
        cluster.ask(m.Stat(inode.number))
    assert cluster.rows(b"O") == cluster.rows(b"S") == 0


def test_the_length_of_a_vanished_writers_file_is_asked_from_the_chains(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7)
    cluster.ask(m.ExtendStripe(inode.number, 1, 5), client=7)
    cluster.ask(m.Create(1, b"g", handle=1), client=8, number=1)
    cluster.now += 50 * S
    cluster.ask(m.KeepAlive(), client=8)
    cluster.now += 10 * S
    (lost,) = cluster.ask(m.Expire(60 * S)).items
    assert (lost.inode, lost.client, lost.chains, lost.length_version) == (inode.number, 7, 8, 0)
    settle = m.Settle(inode.number, 7, 12345, 0, 60 * S)
    assert cluster.ask(settle).length == 12345
    assert cluster.ask(m.Settle(inode.number, 7, 99999, 0, 60 * S)).length == 12345
    assert cluster.rows(b"S") == 1
    assert cluster.ask(m.Expire(60 * S)).items == []
    with pytest.raises(FileError, match="file descriptor"):
        cluster.ask(m.ReportLength(inode.number, 1, 5, 0), client=7)
    assert cluster.ask(m.Expire(60 * S)).items == []


def test_who_comes_back_before_it_is_settled_keeps_its_files(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7)
    cluster.now += 61 * S
    (lost,) = cluster.ask(m.Expire(60 * S), client=1).items
    cluster.ask(m.ReportLength(inode.number, 1, 10, 0), client=7)
    assert cluster.ask(m.Settle(lost.inode, 7, 99, 0, 60 * S)).length == 10
    assert cluster.ask(m.Close(inode.number, 1, 20, 0), client=7).length == 20


def test_attributes_are_set_with_a_length_or_not_at_all(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7)
    cluster.ask(m.Truncate(1, b"f", 3))
    late = m.SetAttributes(inode.number, m.Changes(12, 34, 0o600, 5, 6), 1, 10, 0, True)
    found = cluster.ask(late, client=7)
    assert (found.length, found.uid, found.mode, cluster.rows(b"S")) == (3, 0, 0o644, 1)
    cluster.ask(m.SetAttributes(inode.number, late.changes, 1, 10, found.length_version, True), 7)
    found = cluster.ask(m.Stat(inode.number))
    assert (found.length, found.uid, found.gid, found.mode) == (10, 12, 34, 0o600)
    assert (found.atime, found.mtime, found.ctime) == (5, 6, cluster.now)
    assert cluster.rows(b"S") == 0


def test_one_session_appends_until_it_ends(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7)
    cluster.ask(m.Open(1, b"f", False, 2), client=7)
    cluster.ask(m.Open(1, b"f", False, 1), client=8)
    with pytest.raises(FileError, match="file descriptor"):
        cluster.ask(m.Append(inode.number, 1), client=9)
    for _ in range(2):
        assert cluster.ask(m.Append(inode.number, 1), client=7).length == 0
    for client, handle in ((7, 2), (8, 1)):
        with pytest.raises(FileError, match="busy"):
            cluster.ask(m.Append(inode.number, handle), client=client)
    cluster.ask(m.Close(inode.number, 1, 30, 0), client=7)
    assert cluster.ask(m.Append(inode.number, 1), client=8).length == 30
    cluster.now += 61 * S
    cluster.ask(m.KeepAlive(), client=7)
    cluster.ask(m.Expire(60 * S))
    cluster.ask(m.Settle(inode.number, 8, 50, 0, 60 * S))
    assert cluster.ask(m.Append(inode.number, 2), client=7).length == 50


def test_a_truncate_makes_older_lengths_void(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7)
    cluster.ask(m.ReportLength(inode.number, 1, 100, 0), client=7)
    cut = cluster.ask(m.Truncate(1, b"f", 10))
    assert (cut.length, cut.length_version) == (10, 1)
    late = cluster.ask(m.ReportLength(inode.number, 1, 200, 0), client=7)
    assert (late.length, late.length_version) == (10, 1)
    late = cluster.ask(m.Close(inode.number, 1, 200, 0), client=7)
    assert (late.length, late.length_version, cluster.rows(b"S")) == (10, 1, 1)
    assert cluster.ask(m.ReportLength(inode.number, 1, 50, 1), client=7).length == 50
    cluster.now += 61 * S
    assert cluster.ask(m.Settle(inode.number, 7, 200, 0, 60 * S)).length == 50


def test_a_client_that_ends_leaves_nothing(cluster: Cluster) -> None:
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7, number=1)
    cluster.ask(m.Close(inode.number, 1), client=7, number=2)
    cluster.ask(m.EndClient(), client=7, number=3)
    assert (cluster.rows(b"S"), cluster.rows(b"C"), cluster.rows(b"R")) == (0, 0, 0)
    inode = cluster.ask(m.Create(1, b"f", handle=1), client=7, number=1)
    cluster.ask(m.EndClient(), client=7)
    (lost,) = cluster.ask(m.Expire(60 * S), client=0).items
    cluster.ask(m.Settle(inode.number, 7, lost.length_version, 0, 60 * S), client=0)
    cluster.ask(m.Expire(60 * S), client=0)
    assert (cluster.rows(b"S"), cluster.rows(b"C"), cluster.rows(b"R")) == (0, 0, 0)


def test_no_row_names_a_client_that_has_ended_or_expired(cluster: Cluster) -> None:
    client = 1 << 60
    cluster.ask(m.Create(1, b"f"))
    before = cluster.everything()
    for ends in (True, False):
        for number in range(1, 201):
            call = m.Create(1, b"g", handle=1) if number % 2 else m.Unlink(1, b"g")
            cluster.ask(call, client, number, number - 1)
            if number % 2:
                cluster.ask(m.Close(cluster.ask(m.Stat(1, b"g")).number, 1), client)
        assert b"R" + client.to_bytes(8, "big") + bytes(8) in cluster.everything() - before
        if ends:
            cluster.ask(m.EndClient(), client, 301, 300)
        else:
            cluster.now += 61 * S
            cluster.ask(m.Expire(60 * S), client=0)
        left = cluster.everything() - before
        assert not [key for key in left if client.to_bytes(8, "big") in key]
        assert {key[:1] for key in left} <= {b"M", b"O", b"I", b"N"}


def test_stripes_grow_by_doubling_to_the_layouts(cluster: Cluster) -> None:
    cluster.ask(m.SetLayout(1, b"", Layout(3, 9, 4096, 12)))
    inode = cluster.ask(m.Create(1, b"f", handle=1))
    assert (inode.dyn_stripe, inode.layout.stripe) == (1, 12)
    grown = [
        cluster.ask(m.ExtendStripe(inode.number, 1, index)).dyn_stripe
        for index in (0, 1, 1, 4, 1000)
    ]
    assert grown == [1, 2, 2, 8, 16]
    assert cluster.ask(m.Stat(inode.number)).chains == 12


def test_directories_give_their_layout_to_what_is_made_in_them(cluster: Cluster) -> None:
    layout = Layout(3, 9, 4096, 12)
    cluster.ask(m.MakeDirectory(1, b"d"))
    before = cluster.ask(m.Create(1, b"d/before"))
    assert cluster.ask(m.SetLayout(1, b"d", layout)).layout == layout
    cluster.ask(m.MakeDirectory(1, b"d/e"))
    made = [cluster.ask(m.Create(1, name)) for name in (b"d/e/f", b"d/e/g")]
    for inode in made:
        assert (inode.layout.table, inode.layout.table_version) == (3, 9)
        assert (inode.layout.chunk_size, inode.layout.stripe) == (4096, 12)
    assert made[0].layout.seed != made[1].layout.seed
    assert before.layout.chunk_size == 1 << 20
    assert cluster.ask(m.SetLayout(1, b"d/before", layout)).layout.chunk_size == 4096
    cluster.ask(m.Truncate(1, b"d/before", 5))
    with pytest.raises(FileError, match="not empty"):
        cluster.ask(m.SetLayout(1, b"d/before", layout))
    cluster.ask(m.Open(1, b"d/e/f", handle=1))
    with pytest.raises(FileError, match="busy"):
        cluster.ask(m.SetLayout(1, b"d/e/f", layout))


def test_batches_answer_each_thing_by_itself(cluster: Cluster) -> None:
    d = cluster.ask(m.MakeDirectory(1, b"d")).number
    cluster.ask(m.Create(d, b"old"))
    cluster.ask(m.Symlink(d, b"s", b"old"))
    names = [b"a", b"old", b"a", b"", b"x" * 256, b"n/o", b"..", b"b"]
    made = cluster.ask(m.CreateMany(d, names)).items
    numbers = [item if isinstance(item, int) else "made" for item in made]
    assert numbers == ["made", 17, 17, 2, 36, 22, 17, "made"]
    assert cluster.ask(m.Statfs()).files == 6
    targets = [(d, b"a"), (1, b"d"), (d, b""), (1, b"d/b"), (d, b"none"), (d, b"s"), (10**9, b"")]
    found = cluster.ask(m.StatMany(targets)).items
    single: list[Any] = [cluster.ask(m.Stat(*target, follow=False)) for target in targets[:4]]
    assert found[:4] == single
    assert found[1].nlink == 2
    assert (found[4], found[5].kind, found[6]) == (2, 3, 2)


def test_a_directory_is_listed_in_pages(cluster: Cluster) -> None:
    wanted = sorted(b"%d" % i for i in range(25))
    cluster.ask(m.CreateMany(1, wanted))
    listed: list[bytes] = []
    more = True
    while more:
        after = listed[-1] if listed else b""
        page = cluster.ask(m.ReadDirectory(1, after=after, limit=10, plus=True))
        assert [inode.name for inode in page.inodes] == [name for name, _, _ in page.entries]
        listed += [name for name, _, _ in page.entries]
        more = page.more
    assert listed == wanted


def test_requests_given_together_are_each_done_or_not(cluster: Cluster) -> None:
    calls: list[m.Reading | m.Writing] = [
        m.Create(1, b"a", exclusive=True),
        m.Create(1, b"a", exclusive=True),
        m.Stat(1, b"none"),
        m.MakeDirectory(1, b"d"),
        m.MakeDirectory(1, b"e"),
        m.Unlink(1, b"none"),
    ]
    requests = [Request(ROOT, 1, call, at + 1) for at, call in enumerate(calls)]
    answers: list[object] = [*cluster.service.execute_many(requests)]
    assert sum(isinstance(answer, FileExistsError) for answer in answers[:2]) == 1
    assert isinstance(answers[2], FileNotFoundError)
    assert isinstance(answers[3], Inode)
    assert isinstance(answers[5], FileNotFoundError)
    assert cluster.ask(m.Stat(1)).nlink == 4
    again = cluster.service.execute_many([Request(ROOT, 1, calls[3], 4)])
    assert again[0] == answers[3]


def test_records_go_when_their_answers_are_acknowledged(cluster: Cluster) -> None:
    for number in range(1, 201):
        cluster.ask(m.Create(1, b"f%d" % number), number=number, acknowledged=number - 1)
    assert cluster.rows(b"R") <= 66


def test_uncertain_commits_are_done_once() -> None:
    cluster = Cluster(MemoryEngine(11, conflicts=0.2, maybe=0.4))
    for number in range(1, 300):
        inode = cluster.ask(m.Create(1, b"f%d" % number, exclusive=True), number=number)
        assert inode.name == b"f%d" % number
    assert cluster.ask(m.Statfs()).files == 300


def test_threads_create_in_one_directory(cluster: Cluster) -> None:
    failed: list[FireflyerError] = []

    def work(client: int) -> None:
        for at in range(20):
            try:
                cluster.ask(m.Create(1, b"f%d-%d" % (client, at)), client, at + 1, at)
                cluster.ask(m.MakeDirectory(1, b"d%d-%d" % (client, at)), client, at + 1001)
            except FireflyerError as error:
                failed.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    inodes = cluster.ask(m.ReadDirectory(1, plus=True)).inodes
    assert len({inode.number for inode in inodes}) == 320
    assert cluster.ask(m.Stat(1)).nlink == 162


def test_what_was_answered_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    first = 0
    for _ in range(4):
        read, write = os.pipe()

        def body(write: int = write, first: int = first) -> None:
            cluster = Cluster(SqliteEngine(path))
            for at in range(first, 100_000):
                inode = cluster.ask(m.Create(1, b"f%d" % at, exclusive=True), number=at + 1)
                os.write(write, b"%d %d\n" % (at, inode.number))

        pid = fork_child(body)
        os.close(write)
        said = b""
        while said.count(b"\n") < 60:
            more = os.read(read, 4096)
            assert more, "the writer ended"
            said += more
        os.kill(pid, signal.SIGKILL)
        while more := os.read(read, 4096):
            said += more
        os.close(read)
        os.waitpid(pid, 0)
        engine = SqliteEngine(path)
        cluster = Cluster(engine)
        for line in said.decode().splitlines():
            at, number = map(int, line.split())
            assert cluster.ask(m.Stat(1, b"f%d" % at)).number == number
            first = at + 1
        # One more may be done and not answered: sent again it gets its answer, new or old.
        inode = cluster.ask(m.Create(1, b"f%d" % first, exclusive=True), number=first + 1)
        assert cluster.ask(m.Stat(1, b"f%d" % first)).number == inode.number
        first += 1
        assert cluster.ask(m.Statfs()).files == first + 1
        engine.close()


def test_a_number_of_another_request_is_refused(cluster: Cluster) -> None:
    cluster.ask(m.MakeDirectory(1, b"d"), number=1)
    with pytest.raises(
        ProtocolMismatch, match="request number 1 of client 1 was used for another request"
    ):
        cluster.ask(m.SetXattr(1, b"d", b"user.a", b"v"), number=1)
    with pytest.raises(ProtocolMismatch, match="another request"):
        cluster.ask(m.Expire(5), number=1)


def test_new_files_use_the_newest_table_and_no_more_chains_than_it_has(cluster: Cluster) -> None:
    def layout(name: bytes) -> tuple[int, int]:
        made = cluster.ask(m.Create(1, name)).layout
        return made.table_version, made.stripe

    assert layout(b"before") == (1, 16)
    cluster.service.use_table(1, 2, 5)
    assert layout(b"narrow") == (2, 5)
    cluster.service.use_table(1, 3, 40)
    assert layout(b"wide") == (3, 16)
    cluster.service.use_table(7, 9, 1)
    assert layout(b"same") == (3, 16)


def test_a_refusal_is_kept_with_a_path_that_is_no_text(cluster: Cluster) -> None:
    paths = [b"no\x84where/d", b"\xff" * 256]
    calls = [
        Request(ROOT, 1, m.MakeDirectory(1, path), n + 1, 0, again=True)
        for n, path in enumerate(paths)
    ]
    first: list[Any] = cluster.service.answer_many(calls)
    assert [answer.errno for answer in first] == [errno.ENOENT, errno.ENAMETOOLONG]
    again: list[Any] = cluster.service.answer_many(calls)
    assert [answer.fields() for answer in again] == [answer.fields() for answer in first]
    assert [answer.fields()["path"] for answer in first] == paths
