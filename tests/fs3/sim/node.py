"""A storage node's life around its target: registration, heartbeats and the lease; `storage.py` does
the rest."""

from collections.abc import Callable
from typing import Any

from tests.fs3.sim.managing import Times
from tests.fs3.sim.world import Network, Process, World

from fireflyer.fs3.manager.chains import Chain, Local


class Node(Process):
    """Keeps a lease by heartbeats; tells the target what the manager published and when the lease
    begins or ends.

    The order of what an answered heartbeat does matters: the chains that came with it first, then the
    lease, which counts from when the heartbeat was sent. So whoever holds a lease knows a chain that
    was current after the manager had last counted it alive.
    """

    def __init__(self, world: World, network: Network, name: str, times: Times) -> None:
        super().__init__(world, network, name)
        self.times = times
        self.incarnation = 0
        self.lease_end = -1e9
        self.leased = False
        self.lease_version = 0
        """The chain's version at the manager when the lease was given."""
        self.beats = 0

    def locals_(self) -> dict[int, Local]:
        """What each target says of itself now."""
        raise AssertionError

    def learn(self, chains: tuple[Chain, ...]) -> None:
        """The manager has published these."""
        raise AssertionError

    def lease_changed(self) -> None:
        """`leased` is another now."""
        raise AssertionError

    def register(self, then: Callable[[], None]) -> None:
        """Gets this process its incarnation, however often that needs asking."""

        def told(answer: int | None) -> None:
            if answer is None:
                self.register(then)
            else:
                self.incarnation = answer
                self.note(f"is incarnation {answer}")
                then()

        self.ask("mgr", ("register",), self.times.heartbeat * 2, told)

    def beat(self) -> None:
        """One heartbeat now, the next after a sixth of the lease."""
        self.beats += 1
        sent = self.clock()

        def told(chains: tuple[Chain, ...] | None) -> None:
            if chains is None:
                return
            self.learn(chains)
            self.lease_version = max((chain.version for chain in chains), default=0)
            if sent + self.times.lease > max(self.lease_end, self.clock()):
                self.lease_end = sent + self.times.lease
                self.later(self.lease_end - self.clock(), self.check_lease)
                self.check_lease()

        message: Any = ("heartbeat", self.name, self.incarnation, self.beats, self.locals_())
        self.ask("mgr", message, self.times.lease, told)

    def beat_always(self) -> None:
        self.beat()
        self.later(self.times.heartbeat, self.beat_always)

    def check_lease(self) -> bool:
        """Whether the lease runs; asked before anything that needs one is done."""
        leased = self.clock() < self.lease_end
        if leased != self.leased:
            self.leased = leased
            if self.world.traced:
                self.note("has its lease" if leased else "has lost its lease")
            self.lease_changed()
        return leased
