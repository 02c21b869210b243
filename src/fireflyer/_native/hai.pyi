"""The platform: suspend page and process controls."""



class SuspendPage:
    """
    Page of a node with the number of `suspend_requested()` calls of each rank, and the number of the first call that returns true.
    """

    @staticmethod
    def create(slots: int) -> SuspendPage:
        """Creates a page for `slots` ranks in a new memfd."""

    @staticmethod
    def map(fd: int) -> SuspendPage:
        """Maps the page behind `fd`, which the caller still owns."""

    def call(self, slot: int) -> bool:
        """
        Counts a call. Returns false at once before a freeze; after it, waits for the decision without the GIL.
        """

    def acknowledge(self, slot: int) -> None:
        """Records that the rank in `slot` has saved its state and will exit."""

    def set_apart(self, slot: int) -> None:
        """Answers the slot's calls false, uncounted, until `begin`."""

    def begin(self, slot: int, count: int) -> None:
        """Gives the next call the number `count` + 1; `count` is below 2**62."""

    def join(self, slot: int) -> None:
        """Records that the new rank in `slot` is a member."""

    def renew(self, slot: int) -> None:
        """Prepares the slot for a new rank, and sets it apart."""

    def freeze(self) -> list[int]:
        """Freezes every slot; returns the counts of answered calls."""

    def decide(self, number: int) -> int:
        """Sets the decision unless there is one; returns the decision in force."""

    def count(self, slot: int) -> int:
        """Calls begun by the rank in `slot`."""

    def told(self, slot: int) -> bool:
        """True if a call of the rank in `slot` was answered with true."""

    def acknowledged(self, slot: int) -> bool:
        """True if the rank in `slot` acknowledged."""

    def joined(self, slot: int) -> bool:
        """True if the new rank in `slot` has become a member."""

    @property
    def decision(self) -> int:
        """Number of the first call that returns true; 0: undecided."""

    @property
    def slots(self) -> int: ...

    @property
    def fd(self) -> int:
        """The memfd of a created page; -1 for a mapped one."""

def set_child_subreaper() -> None:
    """Makes orphans among the descendants of this process its children."""

def set_parent_death_signal(signal: int) -> None:
    """
    Makes the kernel send `signal` to this process when its parent dies, also after execve.
    """

def set_process_title(arguments: bytes, environment: bytes) -> None:
    """
    Sets the command line and the first environment variables that /proc shows, each ended by a NUL. The texts are cut to the space that execve left. An empty environment leaves the shown one. REQUIRES: one thread.
    """
