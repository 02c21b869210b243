"""Cases: one call of one collective each, run by the ranks of a gang and compared with the reference.

`COLLECTIVES` says for every collective how it is called and what must hold afterwards.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import Play, difference, place, raw, reference, values


@dataclass(frozen=True)
class Case:
    """One call of one collective by all ranks of a group."""

    collective: str
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    count: int = 7
    memory: str = "staged"
    asynchronous: bool = False
    root: int = 0
    seed: int = 0

    def cost(self) -> tuple[Any, ...]:
        """What comes first is the simpler example."""
        return (self.count, self.asynchronous, self.memory != "staged", self.root, self.seed)


class Call:
    """One rank's part in a case: hands out tensors in the case's memory and collects what is wrong.

    Attributes:
        rank, world: in the group.
        problems: what did not hold on this rank.
        alike: bytes that all ranks of the group must have.
    """

    def __init__(self, case: Case, shape: str, group: Any = None) -> None:
        self.case = case
        self.group = group
        members = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world = len(members)
        self.ranks = range(self.world)
        self.hosts = len({shape[member] for member in members})
        self.op = getattr(dist.ReduceOp, case.op)
        self.problems: list[str] = []
        self.alike = hashlib.sha256()
        self._pristine: list[tuple[torch.Tensor, bytes]] = []
        self._placed = 0

    @property
    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.case.asynchronous}

    def given(self, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        """What `rank` puts in, as every rank knows it."""
        count = self.case.count if count is None else count
        seed = (self.case.seed * 31 + rank) * 37 + part
        return values(self.case.dtype, count, seed, self.case.op)

    def put(self, source: torch.Tensor) -> torch.Tensor:
        """`source` in the case's memory."""
        self._placed += 1
        return place(source, self.case.memory, self.rank + self._placed)

    def input(self, source: torch.Tensor) -> torch.Tensor:
        """`source` in the case's memory; the call must not change it."""
        tensor = self.put(source)
        self._pristine.append((tensor, raw(tensor)))
        return tensor

    def output(self, count: int | None = None) -> torch.Tensor:
        """A tensor whose content the call must replace."""
        count = self.case.count if count is None else count
        return self.put(torch.ones(count).to(self.case.dtype))

    def finish(self, work: Any) -> None:
        """Waits for an asynchronous call's Work or future; a synchronous call has none."""
        assert (work is not None) == self.case.asynchronous
        if work is not None:
            work.wait()

    def expect(
        self,
        got: torch.Tensor,
        wanted: torch.Tensor,
        limit: torch.Tensor | None = None,
        alike: bool = False,
    ) -> None:
        if problem := difference(got, wanted, limit):
            self.problems.append(f"rank {self.rank}: {problem}")
        if alike:
            self.alike.update(raw(got))

    def expect_reduced(
        self, got: torch.Tensor, inputs: Iterable[torch.Tensor], alike: bool = False
    ) -> None:
        wanted, limit = reference(list(inputs), self.case.op, self.hosts)
        self.expect(got, wanted, limit, alike)

    def close(self) -> None:
        for tensor, before in self._pristine:
            if raw(tensor) != before:
                self.problems.append(f"rank {self.rank}: an input was modified")


# -- every collective ------------------------------------------------------------------------------


def _all_reduce(call: Call) -> None:
    tensor = call.put(call.given(call.rank))
    call.finish(dist.all_reduce(tensor, op=call.op, **call.options))
    call.expect_reduced(tensor, map(call.given, call.ranks), alike=True)


def _counts(call: Call) -> tuple[int, ...]:
    return (call.case.count, 7, call.case.count // 2)


def _all_reduce_coalesced(call: Call) -> None:
    counts = list(enumerate(_counts(call)))
    tensors = [call.put(call.given(call.rank, part, n)) for part, n in counts]
    call.finish(dist.all_reduce_coalesced(tensors, op=call.op, **call.options))
    for (part, n), tensor in zip(counts, tensors, strict=True):
        call.expect_reduced(tensor, [call.given(r, part, n) for r in call.ranks], alike=True)


def _reduce(call: Call) -> None:
    tensor = call.put(call.given(call.rank))
    call.finish(dist.reduce(tensor, group_dst=call.case.root, op=call.op, **call.options))
    if call.rank == call.case.root:
        call.expect_reduced(tensor, map(call.given, call.ranks))


def _reduce_scatter(call: Call) -> None:
    inputs = [call.input(call.given(call.rank, part)) for part in call.ranks]
    output = call.output()
    call.finish(dist.reduce_scatter(output, inputs, op=call.op, **call.options))
    call.expect_reduced(output, [call.given(r, call.rank) for r in call.ranks])


def _whole(call: Call, rank: int) -> torch.Tensor:
    return torch.cat([call.given(rank, part) for part in call.ranks])


def _reduce_scatter_tensor(call: Call) -> None:
    output = call.output()
    whole = call.input(_whole(call, call.rank))
    call.finish(dist.reduce_scatter_tensor(output, whole, op=call.op, **call.options))
    call.expect_reduced(output, [call.given(r, call.rank) for r in call.ranks])


def _broadcast(call: Call) -> None:
    root = call.case.root
    tensor = call.input(call.given(root)) if call.rank == root else call.output()
    call.finish(dist.broadcast(tensor, group_src=root, **call.options))
    call.expect(tensor, call.given(root), alike=True)


def _all_gather(call: Call) -> None:
    outputs = [call.output() for _ in call.ranks]
    call.finish(dist.all_gather(outputs, call.input(call.given(call.rank)), **call.options))
    for rank, output in enumerate(outputs):
        call.expect(output, call.given(rank), alike=True)


def _all_gather_into_tensor(call: Call) -> None:
    output = call.output(call.world * call.case.count)
    source = call.input(call.given(call.rank))
    call.finish(dist.all_gather_into_tensor(output, source, **call.options))
    call.expect(output, torch.cat([call.given(r) for r in call.ranks]), alike=True)


def _all_gather_coalesced(call: Call) -> None:
    counts = list(enumerate(_counts(call)))
    inputs = [call.input(call.given(call.rank, part, n)) for part, n in counts]
    outputs = [[call.output(n) for _, n in counts] for _ in call.ranks]
    call.finish(dist.all_gather_coalesced(outputs, inputs, **call.options))
    for rank, gathered in enumerate(outputs):
        for (part, n), output in zip(counts, gathered, strict=True):
            call.expect(output, call.given(rank, part, n), alike=True)


def _own(call: Call, rank: int) -> int:
    """Elements of a rank where every rank has its own number; zero for some."""
    return call.case.count * ((rank + call.case.seed) % 3) // 2


def _all_gather_uneven(call: Call) -> None:
    outputs = [call.output(_own(call, rank)) for rank in call.ranks]
    source = call.input(call.given(call.rank, 0, _own(call, call.rank)))
    call.finish(dist.all_gather(outputs, source, **call.options))
    for rank, output in enumerate(outputs):
        call.expect(output, call.given(rank, 0, _own(call, rank)), alike=True)


def _gather_uneven(call: Call) -> None:
    root, source = call.case.root, call.input(call.given(call.rank, 0, _own(call, call.rank)))
    outputs = [call.output(_own(call, r)) for r in call.ranks] if call.rank == root else None
    call.finish(dist.gather(source, outputs, group_dst=root, **call.options))
    for rank, output in enumerate(outputs or ()):
        call.expect(output, call.given(rank, 0, _own(call, rank)))


def _gather(call: Call) -> None:
    root, source = call.case.root, call.input(call.given(call.rank))
    outputs = [call.output() for _ in call.ranks] if call.rank == root else None
    call.finish(dist.gather(source, outputs, group_dst=root, **call.options))
    for rank, output in enumerate(outputs or ()):
        call.expect(output, call.given(rank))


def _scatter(call: Call) -> None:
    root, output = call.case.root, call.output()
    parts = [call.input(call.given(root, part)) for part in call.ranks]
    mine = parts if call.rank == root else None
    call.finish(dist.scatter(output, mine, group_src=root, **call.options))
    call.expect(output, call.given(root, call.rank))


def _split(call: Call, source: int, destination: int) -> int:
    """Elements of an uneven exchange; zero for some pairs."""
    return call.case.count * ((source + 2 * destination + call.case.seed) % 3) // 2


def _all_to_all(call: Call) -> None:
    me = call.rank
    inputs = [call.input(call.given(me, to, _split(call, me, to))) for to in call.ranks]
    outputs = [call.output(_split(call, origin, me)) for origin in call.ranks]
    call.finish(dist.all_to_all(outputs, inputs, **call.options))
    for origin, output in enumerate(outputs):
        call.expect(output, call.given(origin, me, _split(call, origin, me)))


def _all_to_all_single(call: Call) -> None:
    output = call.output(call.world * call.case.count)
    call.finish(dist.all_to_all_single(output, call.input(_whole(call, call.rank)), **call.options))
    call.expect(output, torch.cat([call.given(r, call.rank) for r in call.ranks]))


def _all_to_all_single_uneven(call: Call) -> None:
    me = call.rank
    sent = [_split(call, me, to) for to in call.ranks]
    taken = [_split(call, origin, me) for origin in call.ranks]
    source = torch.cat([call.given(me, to, n) for to, n in enumerate(sent)])
    output = call.output(sum(taken))
    call.finish(dist.all_to_all_single(output, call.input(source), taken, sent, **call.options))
    call.expect(output, torch.cat([call.given(r, me, n) for r, n in enumerate(taken)]))


def _ring(call: Call) -> None:
    """Point to point: everybody sends to the next rank and receives from the previous one."""
    after, before = (call.rank + 1) % call.world, (call.rank - 1) % call.world
    tag = call.case.seed % 5
    source, output = call.input(call.given(call.rank)), call.output()
    if call.case.asynchronous:
        sending = dist.isend(source, group_dst=after, tag=tag, group=call.group)
        receiving = dist.irecv(output, group_src=before, tag=tag, group=call.group)
        for work in (sending, receiving):
            assert work is not None
            work.wait()
    else:
        for turn in call.ranks:
            if turn == call.rank:
                dist.send(source, group_dst=after, tag=tag, group=call.group)
            elif turn == before:
                dist.recv(output, group_src=before, tag=tag, group=call.group)
    call.expect(output, call.given(before))


def _coalesced(call: Call, issue: Callable[[], None]) -> None:
    with dist._coalescing_manager(group=call.group, async_ops=call.case.asynchronous) as manager:
        issue()
    if call.case.asynchronous:
        manager.wait()


def _managed_all_reduce(call: Call) -> None:
    counts = list(enumerate(_counts(call)))
    tensors = [call.put(call.given(call.rank, part, n)) for part, n in counts]

    def issue() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, op=call.op, group=call.group)

    _coalesced(call, issue)
    for (part, n), tensor in zip(counts, tensors, strict=True):
        call.expect_reduced(tensor, [call.given(r, part, n) for r in call.ranks], alike=True)


def _managed_all_gather(call: Call) -> None:
    counts = list(enumerate(_counts(call)))
    inputs = [call.input(call.given(call.rank, part, n)) for part, n in counts]
    outputs = [call.output(n * call.world) for _, n in counts]

    def issue() -> None:
        for output, source in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, source, group=call.group)

    _coalesced(call, issue)
    for (part, n), output in zip(counts, outputs, strict=True):
        wanted = torch.cat([call.given(r, part, n) for r in call.ranks])
        call.expect(output, wanted, alike=True)


def _managed_reduce_scatter(call: Call) -> None:
    parts, me = range(2), call.rank
    whole = [torch.cat([call.given(me, 9 * p + to) for to in call.ranks]) for p in parts]
    inputs, outputs = list(map(call.input, whole)), [call.output() for _ in parts]

    def issue() -> None:
        for output, source in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, source, op=call.op, group=call.group)

    _coalesced(call, issue)
    for p, output in zip(parts, outputs, strict=True):
        call.expect_reduced(output, [call.given(r, 9 * p + me) for r in call.ranks])


REDUCING: dict[str, Callable[[Call], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "managed_all_reduce": _managed_all_reduce,
    "managed_reduce_scatter": _managed_reduce_scatter,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
}
MOVING: dict[str, Callable[[Call], None]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_uneven": _all_gather_uneven,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": _all_to_all_single_uneven,
    "broadcast": _broadcast,
    "gather": _gather,
    "gather_uneven": _gather_uneven,
    "managed_all_gather": _managed_all_gather,
    "ring": _ring,
    "scatter": _scatter,
}
COLLECTIVES = REDUCING | MOVING


def collectives(world: int) -> list[str]:
    """Names of all collectives that a group of `world` ranks has; nobody sends to himself."""
    return sorted(COLLECTIVES if world > 1 else COLLECTIVES.keys() - {"ring"})


# -- runs of cases ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    case: Case
    problems: tuple[str, ...]
    stopped: bool = False
    """A rank raised or died: the ranks did not go on with the cases after it."""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case."""

    problems: list[str]
    digest: str = ""
    """Of the bytes that all ranks must have."""
    raised: bool = False


def run_case(case: Case, shape: str, group: Any = None) -> Outcome:
    """Runs the case twice on this rank, and never stops between the two for a wrong result."""
    problems: list[str] = []
    digests = []
    for _ in range(2):
        call = Call(case, shape, group)
        try:
            COLLECTIVES[case.collective](call)
        except Exception as error:  # noqa: BLE001  # the parent reports it with its case
            problems.append(f"rank {call.rank}: {type(error).__name__}: {error}"[:300])
            return Outcome(problems, raised=True)
        call.close()
        problems += call.problems
        digests.append(call.alike.hexdigest())
    if not problems and digests[0] != digests[1]:
        problems = [f"rank {call.rank}: bits differ from run to run"]
    return Outcome(problems, digests[0])


def failures_of(play: Play, shape: str, cases: list[Case]) -> list[Failure]:
    """Runs the cases in one gang, up to and including the first that raises."""

    def body(rank: int, world: int) -> list[Outcome]:
        outcomes = []
        for case in cases:
            outcomes.append(run_case(case, shape))
            if outcomes[-1].raised:
                return outcomes
        dist.barrier()
        dist.destroy_process_group()
        return outcomes

    results = play(body, shape, leave=False)
    dead = [f"rank {rank} died" for rank, result in enumerate(results) if result is None]
    common = min((len(result) for result in results if result is not None), default=1)
    failures = []
    for k, case in enumerate(cases[:common]):
        outcomes = [result[k] for result in results if result is not None]
        problems = [p for outcome in outcomes for p in outcome.problems]
        stopped = any(outcome.raised for outcome in outcomes)
        if dead and k == common - 1:
            problems, stopped = dead + problems, True
        if not problems and len({outcome.digest for outcome in outcomes}) > 1:
            problems = ["ranks differ in bits"]
        if problems:
            failures.append(Failure(case, tuple(problems), stopped))
    return failures


def check_cases(play: Play, shape: str, cases: list[Case]) -> None:
    """Runs all cases; fails with the simplest one that also fails alone, and a list of the others."""
    failures: list[Failure] = []
    rest = cases
    for _ in range(4):
        found = failures_of(play, shape, rest)
        failures += found
        if not found or not found[-1].stopped:
            rest = []
            break
        rest = rest[rest.index(found[-1].case) + 1 :]
    if not failures:
        return
    failures.sort(key=lambda f: f.case.cost())
    alone = next((a for f in failures[:4] for a in failures_of(play, shape, [f.case])), None)
    head = "fails alone" if alone else "fails only after the cases before it"
    shown = alone or failures[0]
    lines = [f"on hosts {shape}, {head}: {shown.case}", *shown.problems[:6]]
    lines += [f"{len(failures)} of {len(cases) - len(rest)} cases failed, {len(rest)} not run:"]
    lines += [f"  {f.case}: {f.problems[0][:200]}" for f in failures[:20]]
    pytest.fail("\n".join(lines), pytrace=False)
