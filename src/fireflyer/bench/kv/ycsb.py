"""YCSB's workloads A, B and C on one store, in a process of the Python environment with that store.

    python ycsb.py fireflyer|rocksdict PLACE RECORDS

The process writes RECORDS records of 1 KB and answers "0". Then it answers each line of standard
input, "WORKLOAD THREADS OPERATIONS", with the seconds that the operations took. Updates are durable
when a call returns. Keys are drawn by YCSB's zipfian law (0.99) before the clock starts. With
`rocksdict` the process imports none of our code.
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate

READS = {"A": 0.5, "B": 0.95, "C": 1.0}
VALUE = random.Random(1).randbytes(1000)
Key = bytes


def key_of(number: int) -> Key:
    return b"user%016d" % (number * 0x9E3779B97F4A7C15 % (1 << 53))


def open_fireflyer(place: str) -> tuple[Callable[[Key], object], Callable[[Key, bytes], object]]:
    from fireflyer import kv

    store = kv.open(place, write=True)
    return store.get, store.put


def open_rocksdict(place: str) -> tuple[Callable[[Key], object], Callable[[Key, bytes], object]]:
    from importlib import import_module

    module = import_module("rocksdict")
    options = module.Options(raw_mode=True)
    options.create_if_missing(True)
    store = module.Rdict(place, options)
    durable = module.WriteOptions()
    durable.sync = True
    return store.get, lambda key, value: store.put(key, value, durable)


def drawn(workload: str, records: int, operations: int, seed: int) -> list[tuple[bool, Key]]:
    """Returns (True for a read, key) for each operation."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) ** 0.99 for rank in range(records)))
    chosen = rng.choices(range(records), cum_weights=weights, k=operations)
    return [(rng.random() < READS[workload], key_of(number)) for number in chosen]


def run(
    get: Callable[[Key], object], put: Callable[[Key, bytes], object], parts: list[list[tuple[bool, Key]]]
) -> float:  # fmt: skip
    """Performs the operations of each thread; returns the total time in seconds."""
    gate = threading.Barrier(len(parts) + 1)
    missing: list[Key] = []

    def work(part: list[tuple[bool, Key]]) -> None:
        gate.wait()
        for reads, key in part:
            if reads:
                if get(key) is None:
                    missing.append(key)
            else:
                put(key, VALUE)

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if missing:
        raise SystemExit(f"{len(missing)} records are missing")
    return took


def main() -> None:
    target, place, records = sys.argv[1], sys.argv[2], int(sys.argv[3])
    get, put = {"fireflyer": open_fireflyer, "rocksdict": open_rocksdict}[target](place)
    numbers = range(records)
    threads = [
        threading.Thread(target=lambda part: [put(key_of(n), VALUE) for n in part], args=(part,))
        for part in (numbers[at::64] for at in range(64))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write("0\n")
    sys.stdout.flush()
    for turn, line in enumerate(sys.stdin):
        workload, callers, operations = line.split()
        count = int(operations) // int(callers)
        parts = [
            drawn(workload, records, count, 1000 * turn + caller) for caller in range(int(callers))
        ]
        sys.stdout.write(f"{run(get, put, parts)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
