"""The storage service"""

from collections.abc import Sequence


class Node:
    """The storage service of one process. Any thread."""

    def __init__(self, workers: int = 0, buffers: int = 268435456) -> None:
        """
        workers: threads, 0 for cores + 4. buffers: bytes of payload under way, at most.
        """

    def open(self, path: str, target: int, chain: int, incarnation: int, reserve_bytes: int = 268435456) -> None:
        """
        Opens or makes a target's chunk store in a directory and takes its place in the chain. Writes leave so many bytes of the disk free. Raises StorageError, NoSpace, ValueError.
        """

    def close(self, target: int) -> None: ...

    def routing(self, target: int, version: int, members: Sequence[tuple[int, int, int]]) -> None:
        """
        The target's chain as published: members (target, state, incarnation) in order; an older one is passed over.
        """

    def lease(self, left: float, targets: Sequence[tuple[int, int]]) -> None:
        """
        The lease of these (target, version of its chain at the manager) runs for so many seconds from now.
        """

    def reports(self) -> list[tuple[int, int, int, int, int, int, int, bool]]:
        """
        (target, incarnation, local state, its version, number of its store, chain version known, role, failed) of each.
        """

    def wait(self, seconds: float) -> bool:
        """Until a report changes, at most so long; whether one did."""

    def scrub(self, target: int, inode: int, index: int, limit: int) -> tuple[int, int]:
        """
        Reads and checks up to `limit` chunks after this one; returns the last one. At the end the index is written anew: (0, 0).
        """

    def findings(self) -> tuple[list[tuple[int, int, int, bool]], int]:
        """
        What was found since the last call: (target, inode, index, damaged) of chunks, False when one is whole again or gone; and how many came beyond the first 64 of a target.
        """

    def serve(self, fd: int) -> None:
        """A proved connection of a client or another node."""

    def locate(self, target: int, node: int) -> None:
        """On which node a target is."""

    def connected(self, node: int, fd: int) -> None:
        """A proved connection to a node's service."""

    def wanted(self) -> list[int]:
        """Nodes to which a connection is missing."""

    def statistics(self) -> dict[str, int]:
        """Counters since the start, and what the chunk stores hold."""

    def targets(self) -> dict[int, dict[str, int]]:
        """By target: what its store holds, and counters since it was opened."""

    def timings(self) -> dict[str, tuple[list[int], int]]:
        """
        Of `read` and `write` frames and of `sync`s: how many took less than 2^(13 + n) ns, not less than half of that (the last: all above), and ns in all.
        """

    def stop(self) -> None:
        """
        Ends all threads and closes all targets; nothing may be called afterwards.
        """
