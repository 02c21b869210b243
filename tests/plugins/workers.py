"""Go on with new workers when workers die: the test at hand fails, what they had not begun runs elsewhere.

pytest-xdist's own scheduler runs a test again that has killed its worker, gives work to workers that have not
collected yet, and leaves a new worker waiting for a second test.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling
from xdist.scheduler.protocol import Scheduling
from xdist.workermanage import WorkerController


class _Scheduler(LoadGroupScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    def remove_node(self, node: WorkerController) -> str | None:
        """Takes a worker out; returns the test that it ran, which does not run again here."""
        left = self.assigned_work.pop(node)
        pending = [
            (unit, test) for unit in left.values() for test, done in unit.items() if not done
        ]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        units = {scope: unit for scope, unit in left.items() if not all(unit.values())}
        self.workqueue.update(units)
        for other in self.assigned_work:
            self._reschedule(other)
        return str(crashed)

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return _Scheduler(config, log) if config.getvalue("dist") == "loadgroup" else None
