"""A storage node's life around its target: registration, heartbeats and the lease; `storage.py` does
the rest."""

from collections.abc import Callable, Sequence

from tests.fs3.sim.calling import Caller
from tests.fs3.sim.world import Network, World

from fireflyer.errors import Stale, Unavailable
from fireflyer.fs3.manager.chains import Chain, Local
from fireflyer.fs3.manager.core import Beat, Registered
from fireflyer.fs3.manager.leases import NodeLease
from fireflyer.fs3.manager.routing import Routing


class Node(Caller):
    """Keeps a lease by heartbeats; tells the target what the manager published and when the lease
    begins or ends.

    The order of what an answered heartbeat does matters: the chains that came with it first, then the
    lease, which counts from when the heartbeat was sent. So whoever holds a lease knows a chain that
    was current after the manager had last counted it alive.
    """

    def __init__(
        self, world: World, network: Network, name: str, managers: Sequence[str], lease_s: float
    ) -> None:
        super().__init__(world, network, name, managers, lease_s / 2)
        self.me: Registered | None = None
        self.lease = NodeLease(lease_s)
        self.watching = False
        self.leased = False
        self.lease_version = 0
        """The chain's version at the manager when the lease was given."""

    def locals_(self) -> dict[int, Local]:
        """What each target says of itself now."""
        raise AssertionError

    def route(self, chain: Chain) -> None:
        """The manager has published this."""
        raise AssertionError

    def lease_changed(self) -> None:
        """`leased` is another now."""
        raise AssertionError

    def restart(self) -> None:
        """This process ends, and another one is started."""
        raise AssertionError

    def learn(self, part: Routing) -> None:
        asked = part.question > self.view.question
        for taken in self.view.take(part):
            for chain in taken.chains:
                self.route(chain)
        if asked and self.alive and self.me is not None:
            self.beat()

    def register(self, then: Callable[[], None]) -> None:
        """Gets this process its session, however often that needs asking."""

        def told(answer: Registered | None) -> None:
            if answer is None:
                self.later(0.02, self.register, then)
            else:
                self.me = answer
                self.lease = NodeLease(answer.lease_s)
                self.note(f"is incarnation {answer.session:x}")
                then()

        self.ask_manager(("register", self.name), told)

    def beat(self) -> None:
        """One heartbeat now."""
        assert self.me is not None
        number = self.lease.send(self.clock())

        def told(answer: Routing | Stale | Unavailable | None) -> None:
            if isinstance(answer, Stale):
                self.restart()
            elif isinstance(answer, Routing):
                self.learn(answer)
                if self.alive:
                    self.lease.answered(number)
                    chains = self.view.chains.values()
                    self.lease_version = max((chain.version for chain in chains), default=0)
                    self.watch_lease()

        beat = Beat(
            *(self.me.node, self.me.session, number, self.locals_(), self.view.version),
            question=self.view.question,
        )
        self.ask_manager(beat, told)

    def beat_always(self) -> None:
        """A heartbeat now, the next after a sixth of the lease."""
        assert self.me is not None
        self.beat()
        self.later(self.me.lease_s / 6, self.beat_always)

    def watch_lease(self) -> None:
        """The lease has begun or was extended: its end is looked at when it comes."""
        if self.check_lease() and not self.watching:
            self.watching = True
            self.later(self.lease.ends - self.clock() + 1e-6, self.lease_ends)

    def lease_ends(self) -> None:
        self.watching = False
        self.watch_lease()

    def check_lease(self) -> bool:
        """Whether the lease runs; asked before anything that needs one is done."""
        leased = self.lease.runs(self.clock())
        if leased != self.leased:
            self.leased = leased
            if self.world.traced:
                self.note("has its lease" if leased else "has lost its lease")
            self.lease_changed()
        return leased
