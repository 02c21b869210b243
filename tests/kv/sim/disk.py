"""Objects of a simulated storage, and processes that run protocol steps on it in virtual time.

An operation takes time, takes effect at one moment within it, and answers. The answer of a create, a
write or a deletion may be lost, and its effect may come after the caller gave up. A process may crash
or stall between any two operations. It extends the world of fs3's simulator by storage itself: the
store needs no servers, messages or disks of fs3, but the guarantees of the storage protocol.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fs3.sim.world import Network, Process, World

from fireflyer.errors import FireflyerError, NoSpace, Unavailable
from fireflyer.kv.core.operations import (
    Compute,
    Create,
    Delete,
    ListNames,
    Operation,
    Pause,
    Read,
    Steps,
    Write,
)


@dataclass
class Weather:
    """Chances of one operation."""

    lost: float = 0.0
    """An answer is lost after the effect."""
    failed: float = 0.0
    """The request is lost before the effect."""
    late: float = 0.0
    """The effect comes after the caller was told that there is no answer."""
    fills: float = 0.0
    """The disk is full from the moment on at which an answer is lost."""
    slow: float = 0.02
    stall: float = 0.0
    """The process stalls for up to `stall_s` behind the operation."""
    stall_s: float = 2.0


class Disk:
    """Named objects; each call is one atomic step."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.folders: dict[str, set[str]] = {}
        self.full = False

    def perform(self, operation: Operation) -> Any:
        objects = self.objects
        match operation:
            case Create(name, data):
                self._check_room(name)  # the bytes are written before the name is looked at
                if name in objects:
                    return False
                self._put(name, data)
                return True
            case Write(name, data):
                self._put(name, data)
                return None
            case Read(name, offset, length):
                found = objects.get(name)
                if found is None:
                    return None
                return found[offset:] if length is None else found[offset : offset + length]
            case ListNames(folder):
                return sorted(self.folders.get(folder, ()))
            case Delete(name):
                if objects.pop(name, None) is not None:
                    folder, _, last = name.partition("/")
                    self.folders[folder].discard(last)
                return None
            case Compute(function):
                return function()
            case Pause():
                return None

    def _check_room(self, name: str) -> None:
        if self.full:
            raise NoSpace(f"cannot write {name}: the disk is full")

    def _put(self, name: str, data: bytes) -> None:
        self._check_room(name)
        self.objects[name] = data
        folder, _, last = name.partition("/")
        self.folders.setdefault(folder, set()).add(last)


class Actor(Process):
    """Process that runs protocol steps."""

    def __init__(
        self, world: World, network: Network, name: str, disk: Disk, weather: Weather
    ) -> None:
        super().__init__(world, network, name)
        self.disk = disk
        self.weather = weather

    def go(
        self,
        steps: Steps[Any],
        done: Callable[[Any], None],
        failed: Callable[[FireflyerError], None],
    ) -> None:
        """Runs steps; calls `done(result)` or `failed(error)` unless the process dies."""
        self._send(steps, None, None, done, failed)

    def _send(
        self,
        steps: Steps[Any],
        value: Any,
        failure: FireflyerError | None,
        done: Callable[[Any], None],
        failed: Callable[[FireflyerError], None],
    ) -> None:
        try:
            operation = steps.send(value) if failure is None else steps.throw(failure)
        except StopIteration as end:
            done(end.value)
            return
        except FireflyerError as error:
            failed(error)
            return
        rng, weather = self.world.rng, self.weather
        duration = 0.001 * (0.2 + rng.random())
        if rng.random() < weather.slow:
            duration += 0.1 * rng.random()
        if isinstance(operation, Pause):
            duration = operation.seconds

        def resume(value: Any, failure: FireflyerError | None) -> None:
            wait = rng.random() * weather.stall_s if rng.random() < weather.stall else 0.0
            self.later(wait + duration / 2, self._send, steps, value, failure, done, failed)

        def unanswered() -> None:
            resume(None, Unavailable(f"no answer: {operation}"[:80]))

        def effect() -> None:
            try:
                value = self.disk.perform(operation)
            except FireflyerError as error:
                resume(None, error)
                return
            if writes and chance < weather.lost:
                self.disk.full |= rng.random() < weather.fills
                unanswered()
            else:
                resume(value, None)

        chance = rng.random()
        # The shell repeats reads, writes and deletions; only a create's outcome is the core's affair.
        writes = isinstance(operation, Create)
        if self.world.traced:
            self.note(str(operation)[:110])
        if writes and weather.lost <= chance < weather.lost + weather.failed:
            self.later(duration, unanswered)
        elif (
            writes
            and weather.lost + weather.failed
            <= chance
            < weather.lost + weather.failed + weather.late
        ):
            # In flight without its process: it arrives even after a crash.
            self.world.after(duration + rng.random() * 3.0, self._arrive, operation)
            self.later(duration, unanswered)
        else:
            self.later(duration / 2, effect)

    def _arrive(self, operation: Operation) -> None:
        try:
            self.disk.perform(operation)
        except NoSpace:
            return
