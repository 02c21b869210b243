"""Payload connections between ranks, made when they are first needed and kept for the life of the
group."""

import socket
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from fireflyer.errors import RankFailed, WireError
from fireflyer.hfreduce.handshake import Purpose
from fireflyer.hfreduce.switchboard import Line, give_away
from fireflyer.hfreduce.topology import Card


class Target(Protocol):
    """What takes the connections of one purpose: a native engine object. It owns the descriptors,
    guards them against forks (`fork_guard::add`), and may be called from any thread."""

    def add_outgoing(self, rank: int, fd: int) -> None:
        """A connection that we send on."""

    def add_incoming(self, rank: int, fd: int) -> None:
        """A connection that we receive on."""


class Links:
    """The simplex connections of a group. Thread-safe.

    A sender dials; its peer's acceptor registers the connection as incoming, whatever the peer is
    doing: nobody waits for anybody's call.
    """

    def __init__(self, line: Line, cards: Sequence[Card], timeout_s: float) -> None:
        self._line = line
        self._cards = cards
        self.timeout_s = timeout_s
        self._targets: dict[Purpose, Target] = {}
        self._dialled: dict[Purpose, set[int]] = {}
        self._locks: dict[Purpose, threading.Lock] = {}

    def attach(self, purpose: Purpose, target: Target) -> None:
        """Gives `target` all connections of that purpose, those that have come already too. Once a
        purpose."""
        self._targets[purpose] = target
        self._locks[purpose] = threading.Lock()
        self._dialled[purpose] = {self._line.rank}

        def incoming(rank: int, sock: socket.socket) -> None:
            target.add_incoming(rank, give_away(sock))

        self._line.serve(purpose, incoming)

    def ensure(self, ranks: Collection[int], purpose: Purpose) -> None:
        """Makes outgoing connections to all of `ranks` that have none yet. Idempotent.

        Raises:
            RankFailed: one of them cannot be reached.
        """
        dialled = self._dialled[purpose]
        if dialled.issuperset(ranks):
            return
        with self._locks[purpose]:
            for rank in ranks:
                if rank in dialled:
                    continue
                try:
                    sock = self._line.dial(rank, self._cards[rank], purpose, self.timeout_s)
                except WireError as error:
                    raise RankFailed(f"no connection to rank {rank}: {error}", rank) from error
                self._targets[purpose].add_outgoing(rank, give_away(sock))
                dialled.add(rank)
