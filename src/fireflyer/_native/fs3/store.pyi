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
    """What a Store stands on."""

class DirectoryDisk(Disk):
    """A directory of a real file system, locked for one process."""

    def __init__(self, path: str) -> None: ...

class SimDisk(Disk):
    """
    A disk in memory that forgets what was not synced; the same from the same seeds.
    """

    def __init__(self, seed: int, capacity: int = 1152921504606846976) -> None: ...

    def power_cut(self, seed: int) -> None:
        """Keeps any sectors of what was not synced; close the store before."""

    def crash(self) -> None:
        """Keeps all, as when only the process ends; close the store before."""

    def lie(self, seed: int) -> None:
        """One of the next few writes that are synced is lost or lands elsewhere."""

    def fail(self, after: int, fault: int, times: int = 18446744073709551615) -> None:
        """
        After `after` calls `times` calls fail; fault 0: none, 1: EIO, 2: ENOSPC.
        """

    def calls(self) -> int: ...

    def lies_told(self) -> int: ...

    def used_bytes(self, prefix: str = '') -> int:
        """Of the files whose names begin so."""

class Core:
    """What the lookup of a replica stands on."""

class Store:
    """
    The chunks of one target. native/fs3/store/store.hpp says what each call means.
    """

    def __init__(self, disk: Disk, target: int = 0, chain: int = 0, log_bytes: int = 67108864, reserve_bytes: int = 268435456) -> None:
        """
        Opens or makes it. Raises ValueError for another target's, StorageError or NoSpace.
        """

    @property
    def core(self) -> Core:
        """Good until the store is closed."""

    def close(self) -> None:
        """Writes nothing: what was not synced is as after a crash."""

    def apply(self, op: int, inode: int, index: int, base: int, version: int, chain_version: int, kind: int, offset: int = 0, length: int = 0, data: Buffer = b'', crcs: Buffer = b'', committed: bool = False, client: int = 0, channel: int = 0, seq: int = 0) -> int:
        """0: queued, sync() answers; else the status that refuses it."""

    def sync(self) -> list[tuple[int, int, int, int, int]]:
        """
        Makes all that was applied durable: a list of (op, status, version, length, crc).
        """

    def commit(self, inode: int, index: int, version: int) -> int: ...

    def drop(self, inode: int, index: int, version: int) -> int: ...

    def read(self, inode: int, index: int, version: int = 0, offset: int = 0, length: int = 4294967295) -> tuple[int, int, int, int, bytes, bytes]:
        """
        Whole blocks: (status, version, length of the chunk, offset of the bytes, bytes, CRCs).
        """

    def entry(self, inode: int, index: int) -> tuple[int, int, int, int, int, int, int, int, int, int, bool]:
        """
        (inode, index, then version, chain version, length, crc of the committed version and of the pending one, and whether that removes); version 0: none.
        """

    def page(self, after: tuple[int, int] | None, limit: int) -> list[tuple[int, int, int, int, int, int, int, int, int, int, bool]]:
        """Entries behind `after`, in order."""

    def last(self, inode: int, upto: int = 4294967295, stride: int = 0) -> tuple[int, int, int] | None:
        """
        (index, length, run) of the committed chunk with the largest index up to `upto`.
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
        """Whether the last sync() made its batch durable."""

    def statistics(self) -> dict[str, int]: ...
