"""Benchmark of one collective on one host: ours with every kind of memory, gloo, and Open MPI.

In each round every candidate runs once, and so do the machine's limits: `a += b` and `a += 1` by
torch, and memcpy. All ranks run a limit at once, with one thread each. They use zero-copy memory of
the tensors' size, so that the limit fits into the same caches. The bound of a call is its minimum
bytes moved, divided by the limit with the same share of writes. That limit is `a += 1` for an
in-place allreduce (as many writes as reads), `a += b` for other reductions, and memcpy for pure
moves. The number of cores that the ranks had during `a += b` shows whether the machine was quiet.
"""

import ctypes
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from fireflyer import hfreduce
from fireflyer.bench.collectives import cases
from fireflyer.bench.collectives.mpi import Mpi
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.ranks import Run, Session, Timing, interleave, on_ranks, reason_against
from fireflyer.bench.harness.report import NcclRow, Row
from fireflyer.errors import ConfigError

ADD, UPDATE, COPY = "add limit", "update limit", "copy limit"
_LEAST_LIMIT_BYTES = 1 << 20  # below this size, a limit would measure the overhead of calls


@dataclass(frozen=True)
class Spec:
    """Options of the measurement.

    Attributes:
        dtypes: names of `options.DTYPES`, measured in the same rounds.
        op: one of `options.OPS`; "sum" if the collective takes no op.
        memory: names of `options.MEMORY`.
        against: "gloo", "mpi" or both.
    """

    collective: str
    ranks: int
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    op: str
    memory: tuple[str, ...]
    against: tuple[str, ...]
    rounds: int


@dataclass
class Measured:
    """Results of one size. A candidate is (dtype, memory kind or peer's name); limits are in GB/s,
    one value per round.

    Attributes:
        refused: the reason why a peer cannot run a case.
        cores: number of cores that all ranks together had during the add limit, one value per
            round.
    """

    timings: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    wrong: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)
    cores: list[float] = field(default_factory=list)


def run(spec: Spec) -> tuple[list[Row], list[NcclRow]]:
    """Runs the benchmark; returns the report's rows and the rows of the table like nccl-tests'.

    Raises:
        ConfigError: MPI is requested but missing, or HFReduce does not support the case.
        FireflyerError: a rank failed.
    """
    with ExitStack() as stack:
        mpi = stack.enter_context(Mpi(spec.ranks)) if "mpi" in spec.against else None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = os.path.join(folder, "store")

        def body(rank: int) -> dict[int, Measured]:
            with Session(store, rank, spec.ranks) as session:
                return {size: _measure(session, spec, size, mpi) for size in spec.sizes}

        results: dict[int, Measured] = on_ranks(spec.ranks, body)
    rows: list[Row] = []
    nccl: list[NcclRow] = []
    for size, measured in results.items():
        if measured.cores:
            case = f"{spec.ranks} ranks, {size_text(size)}, cores had while adding"
            there = float(min(spec.ranks, len(os.sched_getaffinity(0))))
            rows.append(Row.of_rates(case, "cores", measured.cores, "cores", [there]))
        for dtype in spec.dtypes:
            nccl += _nccl_rows(spec, size, dtype, measured)
            for memory in spec.memory:
                rows += _rows(spec, size, dtype, memory, measured, mpi.name if mpi else "")
    return rows, nccl


def _measure(session: Session, spec: Spec, size: int, mpi: Mpi | None) -> Measured:
    """Measures on every rank; only rank 0's result is used."""
    measured = Measured()
    runs: dict[str, Run] = {}
    names: dict[str, tuple[str, str]] = {}
    checks: dict[tuple[str, str], Callable[[], int]] = {}
    limit_bytes = _add_limits(session, runs, size) if spec.collective != "barrier" else {}

    def add(key: tuple[str, str], run: Run, check: Callable[[], int]) -> None:
        runs[" ".join(key)] = run
        names[" ".join(key)] = key
        checks[key] = check

    for dtype in spec.dtypes:
        element = getattr(torch, dtype)
        for memory in spec.memory:
            case = cases.build(spec.collective, memory, element, size, spec.op)
            if reason := reason_against(case.run):
                raise ConfigError(f"hfreduce: {spec.collective} of {dtype}, {spec.op}: {reason}")
            add((dtype, memory), partial(session.time, case.run), case.wrong)
        if "gloo" in spec.against:
            case = cases.build(spec.collective, "staged", element, size, spec.op, session.gloo)
            if reason := reason_against(case.run):
                measured.refused[dtype, "gloo"] = f"gloo: {reason}"
            else:
                add((dtype, "gloo"), partial(session.time, case.run), case.wrong)
        if mpi is not None:
            if reason := mpi.refuses(spec.collective, dtype, spec.op):
                measured.refused[dtype, mpi.name] = reason
            else:
                add((dtype, mpi.name), *_mpi_case(session, mpi, spec, dtype, size))
    timings = interleave(runs, spec.rounds)
    measured.cores = [timing.cpu / timing.wall for timing in timings.get(ADD, [])]
    for name, count in limit_bytes.items():
        measured.limits[name] = [count / timing.wall / 1e3 for timing in timings.pop(name)]
    measured.timings = {names[name]: list_ for name, list_ in timings.items()}
    measured.wrong = {key: session.total(check()) for key, check in checks.items()}
    return measured


def _mpi_case(
    session: Session, mpi: Mpi, spec: Spec, dtype: str, size: int
) -> tuple[Run, Callable[[], int]]:
    """Returns a run and a check by Open MPI.

    Rank 0 sends the command and waits for the answer; the other ranks sleep at the next barrier.
    """
    if session.rank != 0:
        return lambda _: Timing(0.0, 0.0), lambda: 0
    case = (spec.collective, dtype, spec.op, size)
    return partial(mpi.run, *case), partial(mpi.wrong, *case)


def _add_limits(session: Session, runs: dict[str, Run], size: int) -> dict[str, int]:
    """Adds the limits to `runs`: on a buffer of `size` bytes per rank, or from one half of that buffer
    to the other.

    Returns the number of bytes that all ranks together read and write in one call.
    """
    whole = hfreduce.empty(max(size, _LEAST_LIMIT_BYTES) // 8 * 2, dtype=torch.float32).zero_()
    a, b = whole.chunk(2)
    runs[ADD] = partial(session.time, partial(a.add_, b))
    runs[UPDATE] = partial(session.time, partial(whole.add_, 1.0))
    runs[COPY] = partial(
        session.time, partial(ctypes.memmove, a.data_ptr(), b.data_ptr(), a.nbytes)
    )
    moved = {ADD: 3 * a.nbytes, UPDATE: 2 * whole.nbytes, COPY: 2 * a.nbytes}
    return {name: count * session.ranks for name, count in moved.items()}


def _rows(
    spec: Spec, size: int, dtype: str, memory: str, measured: Measured, mpi: str
) -> list[Row]:
    ours = measured.timings[dtype, memory]
    walls = [timing.wall for timing in ours]
    formula, moved = cases.bytes_moved(spec.collective, memory, spec.ranks, size)
    limit = _limit(spec.collective, memory)
    bounds = [moved / rate / 1e3 for rate in measured.limits.get(limit, [])]
    case = f"{spec.ranks} ranks"
    if spec.collective != "barrier":
        case += f", {dtype}, {size_text(size)}, {memory}"
    about = (spec.collective, dtype, memory, spec.ranks, size)
    rows = []
    for peer in filter(None, ("gloo" if "gloo" in spec.against else "", mpi)):
        if reason := measured.refused.get((dtype, peer)):
            rows.append(Row.of_times(f"{case}, wall", "us", walls, reason, [], bounds))
            continue
        theirs = measured.timings[dtype, peer]
        goal = goals.against_gloo(*about) if peer == "gloo" else goals.against_mpi(*about)
        cpu_goal = goal if peer == "gloo" else None
        peers = [timing.wall for timing in theirs]
        rows.append(Row.of_times(f"{case}, wall", "us", walls, peer, peers, bounds, goal))
        cpus, peers = [timing.cpu for timing in ours], [timing.cpu for timing in theirs]
        rows.append(Row.of_times(f"{case}, CPU", "us", cpus, peer, peers, (), cpu_goal))
    if dtype == "bfloat16" and "float32" in spec.dtypes:
        peers = [timing.wall for timing in measured.timings["float32", memory]]
        goal = goals.bfloat16_against_float32(spec.collective, size)
        rows.append(Row.of_times(f"{case}, wall", "us", walls, "our float32", peers, (), goal))
    if moved:
        case += f", {formula} = {moved / 1e6:.4g} MB"
        rates = [moved / wall / 1e3 for wall in walls]
        goal = goals.of_add_limit(spec.collective, memory, spec.ranks, size)
        for name, limits in measured.limits.items():
            asked = goal if name == ADD else None
            rows.append(Row.of_rates(case, "GB/s", rates, name, limits, asked))
    return rows


def _limit(collective: str, memory: str) -> str:
    if not cases.ACCOUNTS[collective].reduces:
        return COPY
    return UPDATE if collective == "allreduce" and memory != "shared" else ADD


def _nccl_rows(spec: Spec, size: int, dtype: str, measured: Measured) -> list[NcclRow]:
    itemsize = getattr(torch, dtype).itemsize
    account = cases.ACCOUNTS[spec.collective]
    whole, part = cases.elements(spec.collective, spec.ranks, size, itemsize)
    rows = []
    for (of, who), timings in measured.timings.items():
        if of != dtype:
            continue
        time_us = statistics.median(timing.wall for timing in timings)
        algbw = whole * itemsize / time_us / 1e3
        rows.append(
            NcclRow(
                who=who,
                size=whole * itemsize,
                count=part,
                type=dtype if whole else "none",
                redop=spec.op if account.reduces else "none",
                time_us=time_us,
                algbw=algbw,
                busbw=algbw * account.bus(spec.ranks),
                wrong=measured.wrong[of, who],
            )
        )
    return rows
