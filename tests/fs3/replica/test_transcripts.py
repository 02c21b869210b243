"""One short history for each kind of job. Its transcript, `transcripts/<kind>.txt`, documents the protocol.

python -m tests.fs3.replica.test_transcripts    # writes the transcripts anew
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fs3.replica.chain import A, B, Chain

from fireflyer._native.fs3 import Kind, Status, replica
from fireflyer._native.fs3.replica import State

TEXTS = Path(__file__).parent / "transcripts"


def client_write() -> Chain:
    """A client's writes at the head of two targets."""
    chain = Chain(2)
    chain.note(
        "Two targets serve. A write is durable at the head, then at the tail, then committed."
    )
    chain.route(t1=State.serving, t2=State.serving)
    chain.write(1, A)
    chain.sync(1)
    chain.deliver()
    chain.sync(2)
    chain.deliver()
    chain.note("A removal waits while a creation with a version not above its own is in progress.")
    chain.write(2, B)
    chain.write(3, A, Kind.remove)
    chain.sync(1)
    chain.note("The Update is lost: it is sent again after a pause.")
    chain.lose(1)
    chain.step(1, replica.Retry(4))
    chain.deliver()
    chain.sync(2)
    chain.deliver()
    chain.note("The tail has no space for the removal: the head drops the version and says so.")
    chain.sync(1)
    chain.deliver()
    chain.step(2, replica.Applied(3, Status.no_space))
    chain.deliver()
    chain.sync(1)
    return chain


def forwarded_update() -> Chain:
    """Updates at the middle of three targets."""
    chain = Chain(3)
    chain.note(
        "Three targets serve. The middle one forwards what is durable, and answers when it has an answer."
    )
    chain.route(t1=State.serving, t2=State.serving, t3=State.serving)
    chain.write(1, A)
    chain.sync(1)
    update = chain.net[0].message
    chain.deliver()
    chain.sync(2)
    chain.note("A copy of the Update while the version is pending: the first one gets the answer.")
    chain.step(2, update)
    chain.deliver()
    chain.sync(3)
    chain.deliver()
    chain.note("A late copy: the answer is repeated.")
    chain.step(2, update)
    chain.deliver()
    chain.deliver()
    chain.note(
        "Bytes of the base fail their CRC at the tail: the write goes to it again as whole contents."
    )
    chain.write(2, A)
    chain.sync(1)
    chain.deliver()
    chain.sync(2)
    chain.deliver()
    chain.step(3, replica.Applied(2, Status.corrupt))
    chain.deliver()
    chain.deliver(payload=2)
    return chain


def inherited() -> Chain:
    """A pending version that a restart left behind."""
    chain = Chain(2)
    chain.note(
        "The head crashes when its version is pending, and serves again while target 2 syncs."
    )
    chain.route(t1=State.serving, t2=State.serving)
    chain.write(1, A)
    chain.sync(1)
    chain.net.clear()
    chain.start(1)
    chain.route(t1=State.serving, t2=State.syncing)
    chain.note("The client's retry joins the pending version.")
    chain.write(2, A, seq=1)
    chain.deliver(payload=1)
    chain.sync(2)
    chain.net.pop(0)  # a PageAsk
    chain.deliver()
    return chain


def sync() -> Chain:
    """A target that syncs with its predecessor."""
    chain = Chain(2)
    chain.note("Target 2 has chunk B of another life.")
    chain.step(2, replica.Routing(1, [replica.Member(2, State.serving, 1)]))
    chain.step(2, replica.ClientWrite(1, 1, B, Kind.write, 0, 9, payload=1))
    chain.sync(2)
    chain.note("Target 1 has chunk A.")
    chain.route(t1=State.serving)
    chain.write(2, A)
    chain.sync(1)
    chain.note("Target 1 compares the indexes.")
    chain.route(t1=State.serving, t2=State.syncing)
    chain.deliver()
    chain.deliver()
    chain.note("A is sent whole.")
    chain.deliver(payload=2)
    chain.sync(2)
    chain.deliver()
    chain.note("B is forgotten.")
    chain.deliver()
    chain.sync(2)
    chain.deliver()
    chain.note("Floor and tags make target 2 complete.")
    chain.deliver(payload=3)
    chain.sync(2)
    chain.deliver()
    return chain


def take() -> Chain:
    """A RECOVERING target that lacks a chunk and a removal."""
    chain = Chain(2)
    chain.note("Target 1 has chunk A.")
    chain.step(1, replica.Routing(1, [replica.Member(1, State.serving, 1)]))
    chain.step(1, replica.ClientWrite(1, 1, A, Kind.write, 0, 9, payload=1))
    chain.sync(1)
    chain.note("Target 2 removed A later, and has chunk B.")
    chain.route(t2=State.serving)
    for op, kind in ((2, Kind.write), (3, Kind.write), (4, Kind.remove)):
        chain.write(op, A, kind, at=2)
        chain.sync(2)
    chain.write(5, B, at=2)
    chain.sync(2)
    chain.note("All targets had failed. Target 1 recovers: first it takes contents.")
    chain.route(t1=State.recovering, t2=State.lastsrv)
    chain.deliver()
    chain.deliver()
    chain.note(
        "The contents of B are damaged: they come as they are, because no other target has them."
    )
    chain.deliver()
    chain.deliver(status=Status.corrupt)
    chain.deliver()
    chain.deliver(payload=6)
    chain.sync(1)
    chain.note("Then it takes removals.")
    chain.deliver()
    chain.deliver()
    chain.sync(1)
    chain.note("Then it takes floor and tags.")
    chain.deliver()
    chain.deliver(payload=7)
    chain.sync(1)
    return chain


def repair() -> Chain:
    """Committed contents whose bytes fail their CRC."""
    chain = Chain(3)
    chain.note("Three targets serve chunk A.")
    chain.route(t1=State.serving, t2=State.serving, t3=State.serving)
    chain.write(1, A)
    for target in (1, 2, 3):
        chain.sync(target)
        chain.deliver()
    chain.deliver()
    chain.note("Target 1 fetches the version from target 3, because target 2 does not answer.")
    chain.step(1, replica.Damaged(A))
    chain.lose(1)
    chain.deliver()
    chain.deliver(payload=2)
    chain.sync(1)
    chain.note("No target has an intact copy.")
    chain.step(1, replica.Damaged(A))
    chain.deliver()
    chain.deliver(status=Status.corrupt)
    chain.deliver()
    chain.deliver(status=Status.corrupt)
    return chain


HISTORIES: tuple[Callable[[], Chain], ...] = (
    client_write,
    forwarded_update,
    inherited,
    sync,
    take,
    repair,
)


def transcript(history: Callable[[], Chain]) -> str:
    return "\n".join([f"# {history.__doc__}", *history().lines, ""])


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: str(history.__name__))
def test_the_transcript(history: Callable[[], Chain]) -> None:
    assert transcript(history) == (TEXTS / f"{history.__name__}.txt").read_text()


if __name__ == "__main__":
    for each in HISTORIES:
        (TEXTS / f"{each.__name__}.txt").write_text(transcript(each))
