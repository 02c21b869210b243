"""The storage service"""

from collections.abc import Sequence


class Node:
    """The storage service of one process. Any thread."""

    def __init__(self, workers: int = 0, buffers: int = 268435456) -> None:
        """
        workers: number of threads, 0 for cores + 4. buffers: most bytes of payload in flight.
        """

    def open(self, path: str, target: int, chain: int, incarnation: int, reserve_bytes: int = 268435456) -> None:
        """
        Opens or makes a target's chunk store in a directory and takes its place in the chain. Writes leave `reserve_bytes` of the disk free. Raises StorageError, NoSpace, ValueError.
        """

    def close(self, target: int) -> None: ...

    def routing(self, target: int, version: int, members: Sequence[tuple[int, int, int]]) -> None:
        """
        Sets the target's chain as published: members (target, state, incarnation) in order. Ignores an older version.
        """

    def lease(self, left: float, targets: Sequence[tuple[int, int]]) -> None:
        """
        Grants a lease of `left` seconds from now to these (target, version of its chain at the manager).
        """

    def reports(self) -> list[tuple[int, int, int, int, int, int, int, bool]]:
        """
        (target, incarnation, local state, version of that state, number of the target's store, known chain version, role, failed) of each target.
        """

    def wait(self, seconds: float) -> bool:
        """
        Waits at most `seconds` until a report changes; returns True if one did.
        """

    def scrub(self, target: int, inode: int, index: int, limit: int) -> tuple[int, int]:
        """
        Reads and checks up to `limit` chunks after chunk (inode, index). Returns the last chunk, or (0, 0) if there is none; then the index is also written anew.
        """

    def findings(self) -> tuple[list[tuple[int, int, int, bool]], int]:
        """
        Returns the findings since the last call: (target, inode, index, damaged) of chunks (False: the chunk is whole again or gone), and the number of findings beyond the first 64 of a target.
        """

    def serve(self, fd: int) -> None:
        """Serves an authenticated connection of a client or another node."""

    def locate(self, target: int, node: int) -> None:
        """Records the node of a target."""

    def connected(self, node: int, fd: int) -> None:
        """Takes an authenticated connection to a node's service."""

    def wanted(self) -> list[int]:
        """Nodes to which a connection is missing."""

    def statistics(self) -> dict[str, int]:
        """Counters since the start, and the contents of the chunk stores."""

    def targets(self) -> dict[int, dict[str, int]]:
        """
        By target: the contents of its store, and counters since the store was opened.
        """

    def timings(self) -> dict[str, tuple[list[int], int]]:
        """
        By kind of work (`read` and `write` frames, `sync`s): counts of durations, and their total in ns. Count n: durations from 2^(12 + n) to below 2^(13 + n) ns. The first count also has all shorter durations, the last count all longer ones.
        """

    def stop(self) -> None:
        """Ends all threads and closes all targets. No other call may follow."""
