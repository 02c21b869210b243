"""`make sim N=... SEED=...`: seeded histories on all cores, and the transcript of the first that fails.

python -m tests.fs3.sim.simulate [--histories N] [--seed S] [--jobs J] [--kind KIND]: without --seed,
histories of seeds 1..N; with it, that one, with its transcript in build/sim-KIND-S.txt. KIND is "chunks"
(the seed chooses the family of faults), a family of `profiles.py` for histories of that alone, or "meta".
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import cast

from tests.fs3.sim.cluster import Cluster
from tests.fs3.sim.metasim import MetaCluster, draw_meta
from tests.fs3.sim.profiles import FAMILIES, Profile, draw
from tests.fs3.sim.world import World

HUNG_S = 120.0


@dataclass(frozen=True)
class Result:
    """What became of one history: `error` is empty where it passed."""

    seed: int
    family: str
    error: str
    events: int
    operations: int
    seconds: float
    transcript: tuple[str, ...] = ()


def history(seed: int, family: str = "", *, traced: bool = False) -> Result:
    """Runs the chunk history of a seed. The same seed and code give the same result."""
    return chunk_history(seed, draw(random.Random(seed), family), traced=traced)


def chunk_history(seed: int, profile: Profile, *, traced: bool = False) -> Result:
    return outcome(seed, Cluster(World(seed, traced=traced), profile))


def meta_history(seed: int, *, traced: bool = False) -> Result:
    """Runs the metadata history of a seed, likewise."""
    return outcome(seed, MetaCluster(World(seed, traced=traced), draw_meta(random.Random(seed))))


def outcome(seed: int, cluster: Cluster | MetaCluster) -> Result:
    world, error = cluster.world, ""
    try:
        cluster.run()
    except Exception as failure:  # noqa: BLE001  # whatever it is, it has a seed and a transcript
        error = f"{type(failure).__name__}: {failure}"
        if not isinstance(failure, AssertionError):
            error += "\n" + traceback.format_exc()
    lines = (f"profile: {cluster.profile}", *world.transcript) if world.traced else ()
    family = cluster.profile.family if isinstance(cluster, Cluster) else "meta"
    return Result(seed, family, error, world.events, len(cluster.history), world.now, lines)


HISTORIES: dict[str, Callable[..., Result]] = {
    "chunks": history,
    "meta": meta_history,
    **{family: partial(history, family=family) for family in FAMILIES},
}


def _work(kind: str, seeds: Sequence[int], results: Connection) -> None:
    for seed in seeds:
        results.send(HISTORIES[kind](seed))
    results.close()


def many(kind: str, seeds: Sequence[int], jobs: int) -> Iterator[Result]:
    """The results of histories, by `jobs` processes, as they come. One that kills its process, or
    that does not end within `HUNG_S` of real time, has failed; the rest of that process's seeds is
    left out."""
    shares = [seeds[at::jobs] for at in range(jobs)]
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[ForkProcess, list[int]]] = {}
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(kind, share, theirs), daemon=True)
        process.start()
        theirs.close()
        running[ours] = (process, list(reversed(share)))
    try:
        while running:
            ready = wait(list(running), HUNG_S)
            for connection in cast(list[Connection], ready) or list(running):
                process, left = running[connection]
                try:
                    if not ready:
                        raise EOFError
                    yield connection.recv()
                    left.pop()
                except EOFError:
                    del running[connection]
                    if not ready:
                        process.kill()
                    process.join()
                    if left:
                        what = (
                            f"its process ended with {process.exitcode}"
                            if ready
                            else "does not end"
                        )
                        yield Result(left[-1], kind, what, 0, 0, 0.0)
    finally:
        for process, _ in running.values():
            process.kill()


def transcript_of(kind: str, seed: int) -> tuple[Result, Path]:
    """Runs a seed once more, with its transcript in a file."""
    result = HISTORIES[kind](seed, traced=True)
    path = Path("build") / f"sim-{kind}-{seed}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*result.transcript, result.error or "passed", ""]))
    return result, path


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim")
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--kind", choices=sorted(HISTORIES), default="chunks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep-going", action="store_true", help="report every failing seed")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        result, path = transcript_of(arguments.kind, arguments.seed)
        print(f"seed {result.seed}: {result.error or 'passed'}\ntranscript: {path}")
        return 1 if result.error else 0
    began = time.monotonic()
    done = events = operations = 0
    virtual = 0.0
    failed: list[int] = []
    seeds = range(arguments.first, arguments.first + arguments.histories)
    for result in many(arguments.kind, seeds, arguments.jobs):
        done += 1
        events += result.events
        operations += result.operations
        virtual += result.seconds
        if result.error:
            failed.append(result.seed)
            said = result.error.splitlines()[0]
            print(f"seed {result.seed} ({result.family}): {said}", flush=True)
            if not arguments.keep_going:
                break
        if sys.stderr.isatty() or done % 1000 == 0:
            took = time.monotonic() - began
            print(f"\r{done} histories, {done / took:.1f}/s", end="", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(
        f"\n{done} histories in {took:.1f} s: {done / took:.1f} histories/s, {events / took:.0f} events/s, "
        f"{operations} operations, {virtual / 3600:.1f} h of virtual time; {len(failed)} failed"
    )
    if failed:
        result, path = transcript_of(arguments.kind, failed[0])
        print(
            f"\nseed {failed[0]}: {result.error}\ntranscript: {path}; again: make sim SEED={failed[0]}"
            + ("" if arguments.kind == "chunks" else f' ARGS="--kind {arguments.kind}"')
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
