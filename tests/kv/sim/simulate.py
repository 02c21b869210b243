"""`make sim-kv N=10000 [SEED=x]`: seeded histories of the store on all cores.

With --seed: that history, with its transcript in build/sim-kv-SEED.txt.
"""

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

from tests.kv.sim.history import history


def _run(seed: int) -> tuple[int, str, int]:
    error, _, operations = history(seed)
    return seed, error, operations


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim-kv")
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    if chosen.seed is not None:
        error, lines, _ = history(chosen.seed, traced=True)
        path = Path("build") / f"sim-kv-{chosen.seed}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*lines, error or "passed", ""]))
        print(f"seed {chosen.seed}: {error or 'passed'}\ntranscript: {path}")
        return 1 if error else 0
    began, operations, failed = time.monotonic(), 0, 0
    seeds = range(chosen.first, chosen.first + chosen.histories)
    with multiprocessing.Pool(chosen.jobs) as pool:
        for seed, error, count in pool.imap_unordered(_run, seeds, chunksize=20):
            operations += count
            if error:
                failed += 1
                print(f"seed {seed}: {error}", flush=True)
    took = time.monotonic() - began
    print(
        f"{chosen.histories} histories, {operations} acknowledged batches, {took:.0f} s, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
