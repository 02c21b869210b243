"""The platform: suspend page and process controls."""



class SuspendPage:
    """
    The calls of `suspend_requested()` on a node, and the first one answered true.
    """

    @staticmethod
    def create(slots: int) -> SuspendPage:
        """A new page for `slots` ranks in a memfd of its own."""

    @staticmethod
    def map(fd: int) -> SuspendPage:
        """The page behind `fd`, which stays the caller's."""

    def call(self, slot: int) -> bool:
        """
        Counts a call. False at once before a freeze; after it, waits without the GIL.
        """

    def acknowledge(self, slot: int) -> None:
        """The rank in `slot` saved and leaves."""

    def set_apart(self, slot: int) -> None:
        """Calls are answered with false, and not counted, until `begin`."""

    def begin(self, slot: int, count: int) -> None:
        """The next call has number `count` + 1; `count` is below 2**62."""

    def join(self, slot: int) -> None:
        """The newcomer in `slot` is a member now."""

    def renew(self, slot: int) -> None:
        """The slot gets a newcomer, which is set apart."""

    def freeze(self) -> list[int]:
        """Freezes every slot; the counts of answered calls."""

    def decide(self, number: int) -> int:
        """Sets the decision unless there is one; returns the one in force."""

    def count(self, slot: int) -> int:
        """Calls begun by the rank in `slot`."""

    def told(self, slot: int) -> bool:
        """Whether a call of the rank in `slot` was answered with true."""

    def acknowledged(self, slot: int) -> bool:
        """Whether the rank in `slot` acknowledged."""

    def joined(self, slot: int) -> bool:
        """Whether the newcomer in `slot` has become a member."""

    @property
    def decision(self) -> int:
        """First call number answered with true; 0: none yet."""

    @property
    def slots(self) -> int: ...

    @property
    def fd(self) -> int:
        """The memfd of a created page; -1 for a mapped one."""

def set_child_subreaper() -> None:
    """Orphans among the descendants of this process become its children."""

def set_parent_death_signal(signal: int) -> None:
    """Sends `signal` to this process when its parent dies; kept over execve."""

def set_process_title(arguments: bytes, environment: bytes) -> None:
    """
    What /proc shows as command line and first variables, each ended by a NUL, cut off where execve left no room. An empty environment leaves the shown one. REQUIRES: one thread.
    """
