"""
Chunk stores on real and simulated disks. Statuses and kinds are indices of statuses() and kinds().
"""

from typing_extensions import Buffer


def statuses() -> tuple[str, ...]:
    """The names of the statuses, by number."""

def kinds() -> tuple[str, ...]:
    """The names of the kinds of an apply, by number."""

ANY_BASE: int = 18446744073709551615

class Disk:
    """Storage of a Store."""

class DirectoryDisk(Disk):
    """A directory of a real file system, locked for one process."""

    def __init__(self, path: str) -> None: ...

class SimDisk(Disk):
    """
    A disk in memory that may lose unsynced data; deterministic for equal seeds.
    """

    def __init__(self, seed: int, capacity: int = 1152921504606846976) -> None: ...

    def power_cut(self, seed: int) -> None:
        """Keeps a random part of the unsynced sectors. Close the store before."""

    def crash(self) -> None:
        """Keeps all data, as when only the process ends. Close the store before."""

    def lie(self, seed: int) -> None:
        """Loses or misplaces one of the next few writes that are synced."""

    def fail(self, after: int, fault: int, times: int = 18446744073709551615) -> None:
        """
        Makes `times` calls fail after `after` more calls; fault 0: none, 1: EIO, 2: ENOSPC.
        """

    def calls(self) -> int: ...

    def lies_told(self) -> int: ...

    def used_bytes(self, prefix: str = '') -> int:
        """Bytes used by the files with this prefix."""

class Core:
    """Native store, for a replica's StoreLookup."""

class Store:
    """
    The chunks of one target. native/fs3/store/store.hpp documents each call.
    """

    def __init__(self, disk: Disk, target: int = 0, chain: int = 0, log_bytes: int = 67108864, reserve_bytes: int = 268435456) -> None:
        """
        Opens or makes a store. Raises ValueError for another target's store, StorageError or NoSpace.
        """

    @property
    def core(self) -> Core:
        """Valid until the store is closed."""

    def close(self) -> None:
        """
        Closes the store without a write: unsynced changes are as after a crash.
        """

    def apply(self, op: int, inode: int, index: int, base: int, version: int, chain_version: int, kind: int, offset: int = 0, length: int = 0, data: Buffer = b'', crcs: Buffer = b'', committed: bool = False, client: int = 0, channel: int = 0, seq: int = 0) -> int:
        """
        Returns 0 if the change is queued (sync() returns its outcome), else the status of the refusal.
        """

    def sync(self) -> list[tuple[int, int, int, int, int]]:
        """
        Makes all applied changes durable; returns a list of (op, status, version, length, crc).
        """

    def commit(self, inode: int, index: int, version: int) -> int: ...

    def drop(self, inode: int, index: int, version: int) -> int: ...

    def read(self, inode: int, index: int, version: int = 0, offset: int = 0, length: int = 4294967295) -> tuple[int, int, int, int, bytes, bytes]:
        """
        Reads whole blocks: (status, version, length of the chunk, offset of the bytes, bytes, CRCs).
        """

    def entry(self, inode: int, index: int) -> tuple[int, int, int, int, int, int, int, int, int, int, bool]:
        """
        (inode, index, then version, chain version, length, crc of the committed version and of the pending one, and whether the pending version removes the chunk); version 0: none.
        """

    def page(self, after: tuple[int, int] | None, limit: int) -> list[tuple[int, int, int, int, int, int, int, int, int, int, bool]]:
        """Entries behind `after`, in order."""

    def last(self, inode: int, upto: int = 4294967295, stride: int = 0) -> tuple[int, int, int] | None:
        """
        (index, length, run) of the committed chunk with the largest index up to `upto`. run: number of chunks, `stride` indexes apart, in the row that ends there; 1 without a stride.
        """

    def check(self, inode: int, index: int) -> int:
        """Status of the committed bytes against their CRCs."""

    def snapshot(self) -> int: ...

    def snapshot_due(self) -> bool: ...

    def floor(self) -> int: ...

    def raise_floor(self, floor: int) -> None: ...

    def tags(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """
        (client, channel, seq, inode, index, version, length) of the newest write of each channel.
        """

    def keep_tag(self, client: int, channel: int, seq: int, inode: int, index: int, version: int, length: int) -> None: ...

    def forget_client(self, client: int) -> None: ...

    def state(self) -> tuple[int, int, int, int]: ...

    def keep_state(self, a: int, b: int, c: int, d: int) -> None: ...

    def damaged(self) -> bool: ...

    def clear_damage(self) -> None: ...

    def failed(self) -> bool: ...

    def synced(self) -> bool:
        """True if the last sync() made its batch durable."""

    def statistics(self) -> dict[str, int]: ...
