"""The manager as its callers see it: whichever process seems primary, and a copy of the routing."""

from collections.abc import Sequence
from typing import Any

from tests.fs3.sim.world import Action, Answering, Network, Process, World

from fireflyer.errors import NotPrimary
from fireflyer.fs3.manager.routing import Routing, View


class Caller(Process):
    """A process that asks the managers and is told of changes."""

    def __init__(
        self, world: World, network: Network, name: str, managers: Sequence[str], timeout: float
    ) -> None:
        """`timeout`: after so many seconds without an answer the next manager is asked."""
        super().__init__(world, network, name)
        self.managers = managers
        self.manager = managers[0]
        self.timeout = timeout
        self.view = View()

    def ask_manager(self, message: Any, done: Action) -> None:
        """`done(answer)`: None where there was none, or that manager is not the primary."""
        asked = self.manager

        def told(answer: Any) -> None:
            if answer is None or isinstance(answer, NotPrimary):
                if asked == self.manager:
                    after = self.managers.index(asked) + 1
                    hint = answer.address if answer is not None else ""
                    self.manager = hint or self.managers[after % len(self.managers)]
                answer = None
            done(answer)

        self.ask(asked, message, self.timeout, told)

    def received(self, message: Any, answer: Answering) -> None:
        assert isinstance(message, Routing)
        self.learn(message)

    def learn(self, part: Routing) -> None:
        """The manager has published this."""
        self.view.take(part)
