"""A chain of replicas over stores in maps, driven by hand: each event and action becomes a line."""

from collections.abc import Iterable

from fireflyer._native.fs3 import ChunkId, Kind, Status, Tag, replica
from fireflyer._native.fs3.replica import State

A, B = ChunkId(1), ChunkId(2)


class Chain:
    """Targets 1, 2, ... Messages wait in `net` and Applies in the stores until the script lets them go.

    Attributes:
        lines: the transcript.
    """

    def __init__(self, targets: int) -> None:
        self.lines: list[str] = []
        self.net: list[replica.Send] = []
        self._stores = {target: replica.MapStore() for target in range(1, targets + 1)}
        self._replicas: dict[int, replica.Replica] = {}
        self._incarnations = dict.fromkeys(self._stores, 0)
        self._version = 0
        for target in self._stores:
            self.start(target)

    def note(self, text: str) -> None:
        """Writes a comment."""
        self.lines += ["", f"# {text}"]

    def start(self, target: int) -> None:
        """Starts a target, again if it ran. Its store stays."""
        self._incarnations[target] += 1
        self._replicas[target] = replica.Replica(
            target, self._incarnations[target], self._stores[target], page=4, window=1
        )
        self._replicas[target].step(replica.Lease(True))

    def route(self, **states: State) -> None:
        """Tells the targets a new version of the chain: `t1=State.serving, ...`, in order."""
        self._version += 1
        targets = {int(name[1:]): state for name, state in states.items()}
        members = [
            replica.Member(target, state, self._incarnations[target])
            for target, state in targets.items()
        ]
        for target in targets:
            self.step(target, replica.Routing(self._version, members))

    def write(
        self, op: int, chunk: ChunkId, kind: Kind = Kind.write, *, at: int = 1, seq: int = 0
    ) -> None:
        """Lets the client of `op` write; its payload has the number of the op."""
        tag = Tag(5, 0, seq or op)
        payload = 0 if kind is Kind.remove else op
        self.step(at, replica.ClientWrite(op, self._version, chunk, kind, 0, 9, tag, payload))

    def step(self, target: int, event: object) -> None:
        self.lines.append(f"{target} < {event}")
        actions = self._replicas[target].step(event)  # type: ignore[call-overload]
        self.lines += [f"{target}     > {action}" for action in actions]
        for action in actions:
            self._carry_out(target, action)

    def sync(self, target: int) -> None:
        """Makes the target's Applies, Drops and Concludes durable."""
        for applied in self._stores[target].sync():
            self.step(target, applied)

    def deliver(self, payload: int = 0, status: Status | None = None) -> None:
        """Delivers the oldest message. `payload`: contents that come with it; `status`: of the contents."""
        send = self.net.pop(0)
        message = send.message
        if payload:
            message.payload = payload  # type: ignore[union-attr]
        if status is not None:
            message.status = status  # type: ignore[union-attr, misc]
        self.step(send.to, message)

    def lose(self, target: int, status: Status = Status.io_error) -> None:
        """Loses the oldest message, which `target` sent."""
        self.step(target, replica.SendFailed(self.net.pop(0).message.op, status))

    def _carry_out(self, target: int, action: object) -> None:
        store = self._stores[target]
        refused: Iterable[replica.Applied] = ()
        match action:
            case replica.Apply():
                refused = store.apply(action, action.payload)
            case replica.Commit():
                store.commit(action)
            case replica.Drop():
                store.drop(action)
            case replica.Mark():
                store.mark()
            case replica.Conclude():
                store.conclude(action, [])
            case replica.Send():
                self.net.append(action)
        for applied in refused:
            self.step(target, applied)
