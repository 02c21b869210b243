"""Payload connections between ranks, made on first use and kept for the life of the group."""

import socket
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from fireflyer.errors import RankFailed, WireError
from fireflyer.hfreduce.rendezvous.connection_listener import GroupEndpoint, give_away
from fireflyer.hfreduce.rendezvous.handshake import Purpose
from fireflyer.hfreduce.topology import RankInfo


class Target(Protocol):
    """Native engine object that takes the connections of one purpose.

    It owns the descriptors, guards them against forks (`fork_guard::add`), and may be called from
    any thread.
    """

    def add_outgoing(self, rank: int, fd: int) -> None:
        """Adds a connection on which this rank sends."""

    def add_incoming(self, rank: int, fd: int) -> None:
        """Adds a connection on which this rank receives."""


class Links:
    """Simplex connections of a group. Thread-safe.

    The sender dials, and the peer's acceptor registers the connection as incoming. Neither rank
    waits for a call of the other.
    """

    def __init__(
        self, endpoint: GroupEndpoint, infos: Sequence[RankInfo], timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._infos = infos
        self.timeout_s = timeout_s
        self._targets: dict[Purpose, Target] = {}
        self._dialled: dict[Purpose, set[int]] = {}
        self._locks: dict[Purpose, threading.Lock] = {}

    def attach(self, purpose: Purpose, target: Target) -> None:
        """Passes all connections of `purpose` to `target`, including earlier connections. Must be
        called once per purpose."""
        self._targets[purpose] = target
        self._locks[purpose] = threading.Lock()
        self._dialled[purpose] = {self._endpoint.rank}

        def incoming(rank: int, sock: socket.socket) -> None:
            target.add_incoming(rank, give_away(sock))

        self._endpoint.serve(purpose, incoming)

    def ensure(self, ranks: Collection[int], purpose: Purpose) -> None:
        """Makes outgoing connections to `ranks`, except where one exists.

        Raises:
            RankFailed: one of the ranks cannot be reached.
        """
        dialled = self._dialled[purpose]
        if dialled.issuperset(ranks):
            return
        with self._locks[purpose]:
            for rank in ranks:
                if rank in dialled:
                    continue
                try:
                    sock = self._endpoint.dial(rank, self._infos[rank], purpose, self.timeout_s)
                except WireError as error:
                    raise RankFailed(f"no connection to rank {rank}: {error}", rank) from error
                self._targets[purpose].add_outgoing(rank, give_away(sock))
                dialled.add(rank)
