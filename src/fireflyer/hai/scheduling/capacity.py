"""Free capacity by node: an index that finds the nodes for a job in a few integer operations.

A set of nodes is an `int` with one bit per node, by its place in the cluster. Such sets are values:
a plan works on a copy (a handful of references) and leaves the original unchanged. Pure.
"""

from collections.abc import Iterator


def members(nodes: int) -> Iterator[int]:
    """Yields the places of the nodes in a set, lowest first."""
    if nodes.bit_count() < 8:
        while nodes:
            lowest = nodes & -nodes
            yield lowest.bit_length() - 1
            nodes ^= lowest
        return
    # This costs one pass over the bits. Arithmetic would cost a pass for each member.
    bits = bin(nodes)[:1:-1]
    place = bits.find("1")
    while place >= 0:
        yield place
        place = bits.find("1", place + 1)


class Capacity:
    """Free GPUs and memory by node, and the set of idle nodes.

    A job takes whole nodes (`gpus` = 0) or some GPUs of each of its nodes. A node without GPUs can
    be taken only whole. Unknown memory (0) is not limited.
    """

    __slots__ = (
        "_alone",
        "_at_least",
        "_jobs",
        "_sized",
        "free",
        "idle",
        "largest",
        "memory",
        "total",
        "total_memory",
        "whole",
    )

    def __init__(self) -> None:
        self.total: list[int] = []
        """GPUs of each node."""
        self.free: list[int] = []
        self.total_memory: list[int] = []
        self.memory: list[int] = []
        self._jobs: list[int] = []
        self._alone: dict[int, int] = {}
        """GPUs that a job took with a complete node, by place. The number is kept because the size
        of the node may change before the job gives the GPUs back."""
        self.idle = 0
        """Nodes that hold no job."""
        self.whole = 0
        """Nodes that hold at most one job at a time."""
        self.largest = 0
        """GPUs of the largest node."""
        self._sized: dict[tuple[int, int], int] = {}
        self._at_least: list[int] = [0]
        """Element g: nodes with at least g free GPUs. Element 0 is unused."""

    def copy(self) -> "Capacity":
        """Returns an independent copy."""
        other = Capacity.__new__(Capacity)
        other.total = self.total
        other.total_memory = self.total_memory
        other.free = self.free.copy()
        other.memory = self.memory.copy()
        other._jobs = self._jobs.copy()
        other._alone = self._alone.copy()
        other.idle = self.idle
        other.whole = self.whole
        other.largest = self.largest
        other._sized = self._sized
        other._at_least = self._at_least.copy()
        return other

    def add(self, gpus: int, memory_mib: int, *, whole: bool = False) -> int:
        """Appends an idle node; returns its place."""
        place = len(self.total)
        self.total.append(gpus)
        self.total_memory.append(memory_mib)
        self.free.append(0)
        self.memory.append(memory_mib)
        self._jobs.append(0)
        self._at_least.extend([0] * (gpus + 1 - len(self._at_least)))
        self.largest = max(self.largest, gpus)
        self._sized.clear()
        self.idle |= 1 << place
        self.whole |= whole << place
        self._shift(place, gpus)
        return place

    def resize(self, place: int, gpus: int, memory_mib: int, *, whole: bool = False) -> None:
        """Changes a node's size. Taken capacity stays taken, so the free capacity may become
        negative. `whole` changes only while the node is idle."""
        self._at_least.extend([0] * (gpus + 1 - len(self._at_least)))
        self.largest = max(self.largest, gpus)
        self._sized.clear()
        if self.idle >> place & 1:
            self.whole = self.whole & ~(1 << place) | whole << place
        self._shift(place, self.free[place] + gpus - self.total[place])
        self.memory[place] += memory_mib - self.total_memory[place]
        self.total[place], self.total_memory[place] = gpus, memory_mib

    def share(self, place: int, gpus: int) -> int:
        """Returns the number of GPUs that a job gets on a node if it asks for `gpus` (0: all)."""
        return gpus if gpus and not self.whole >> place & 1 else self.total[place]

    def take(self, place: int, gpus: int, memory_mib: int) -> None:
        """Takes `gpus` GPUs of a node (0: all of it) for a job."""
        self._jobs[place] += 1
        self.idle &= ~(1 << place)
        self.memory[place] -= memory_mib
        share = self.share(place, gpus)
        if not gpus or self.whole >> place & 1:
            self._alone[place] = share
        self._shift(place, self.free[place] - share)

    def give(self, place: int, gpus: int, memory_mib: int) -> None:
        """Reverses `take`."""
        self._jobs[place] -= 1
        if not self._jobs[place]:
            self.idle |= 1 << place
        self.memory[place] += memory_mib
        alone = not gpus or self.whole >> place & 1
        share = self._alone.pop(place, self.total[place]) if alone else self.share(place, gpus)
        self._shift(place, self.free[place] + share)

    def _shift(self, place: int, free: int) -> None:
        before, bit = self.free[place], 1 << place
        self.free[place] = free
        at_least = self._at_least
        for gpus in range(max(before, 0) + 1, free + 1):
            at_least[gpus] |= bit
        for gpus in range(max(free, 0) + 1, before + 1):
            at_least[gpus] &= ~bit

    def fitting(self, gpus: int, memory_mib: int, among: int) -> int:
        """Returns the nodes of `among` with enough free capacity for one member of a gang now."""
        if gpus == 0:
            found = self.idle & among
        elif gpus < len(self._at_least):
            found = self._at_least[gpus] & among
        else:
            return 0
        if memory_mib:
            for place in members(found):
                if self.total_memory[place] and self.memory[place] < memory_mib:
                    found ^= 1 << place
        return found

    def most_free(self, among: int) -> int:
        """Returns the largest number of GPUs that are free on one of these nodes."""
        counts = range(len(self._at_least) - 1, 0, -1)
        return next((gpus for gpus in counts if self._at_least[gpus] & among), 0)

    def lacks(self, place: int, gpus: int, memory_mib: int) -> tuple[int, int] | None:
        """Returns the GPUs and MiB that a node lacks for one member; a negative number is a
        surplus. None: the node is too small."""
        total, total_memory = self.total[place], self.total_memory[place]
        if gpus > total or (memory_mib and 0 < total_memory < memory_mib):
            return None
        memory = memory_mib - self.memory[place] if memory_mib and total_memory else 0
        return gpus - self.free[place], memory

    def sized(self, gpus: int, memory_mib: int, among: int) -> int:
        """Returns the nodes of `among` that are large enough, free or not."""
        found = self._sized.get((gpus, memory_mib))
        if found is None:
            found = 0
            for place, total in enumerate(self.total):
                memory = self.total_memory[place] or memory_mib
                if total >= gpus and memory >= memory_mib:
                    found |= 1 << place
            self._sized[gpus, memory_mib] = found
        return found & among

    def tightest(self, gpus: int, among: int) -> int:
        """Returns the nodes of `among` with the fewest free GPUs (best fit)."""
        at_least = self._at_least
        for free in range(gpus, len(at_least) - 1):
            found = among & ~at_least[free + 1]
            if found:
                return found
        return among
