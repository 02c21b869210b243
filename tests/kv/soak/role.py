"""One process of the soak: `python -m tests.kv.soak.role writer|reader|pages URL SEED`.

It tells what it does as lines of standard output, each in one write: "TIME WHAT ...". The monotonic
clock is that of the machine, so lines of all processes have one order.
"""

import os
import random
import sys
import time

from fireflyer import kv
from fireflyer.errors import FireflyerError, NoSpace, SnapshotGone, Stale, StorageError

KEYS = 200
CAPACITY = 48 << 20


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, (f"{time.monotonic():.6f}", *words))) + "\n").encode())


def page_of(key: bytes) -> bytes:
    rng = random.Random(key)
    return rng.randbytes(rng.randrange(20_000, 300_000))


def write(url: str, rng: random.Random) -> None:
    """Puts values that name their epoch and count, and tells before and after each."""
    with kv.open(f"{url}/store", write=True, memtable=200_000) as store:
        tell("opened", store.epoch)
        for count in range(1 << 40):
            keys = rng.sample(range(KEYS), rng.choice((1, 1, 3)))
            value = f"{store.epoch:08}.{count:010}"
            called = f"{time.monotonic():.6f}"
            try:
                with store.batch() as batch:
                    for key in keys:
                        batch.put(b"key%d" % key, f"{key}/{value}/".encode() + bytes(500))
            except NoSpace:
                continue
            tell("acknowledged", called, value, *keys)
            if rng.random() < 0.01:
                store.collect()


def read(url: str, rng: random.Random) -> None:
    """Reads keys, whose values may not go back; scans snapshots."""
    newest: dict[int, str] = {}
    with kv.open(f"{url}/store") as store:
        tell("opened", 0)
        while True:
            number = rng.randrange(KEYS)
            found = store.get(b"key%d" % number)
            if found is not None:
                key, value, _ = found.decode("ascii").split("/")
                if int(key) != number or value < newest.get(number, ""):
                    tell("WRONG", number, key, value, newest.get(number))
                newest[number] = value
            if rng.random() < 0.002:
                try:
                    with store.snapshot(seconds=30) as snapshot:
                        if list(snapshot.scan()) != list(snapshot.scan()):
                            tell("WRONG", "a snapshot changed")
                except SnapshotGone:
                    continue
            time.sleep(0.001)


def cache(url: str, rng: random.Random) -> None:
    """Sets and gets pages of a full cache; what is there must be the key's own page."""
    with kv.cache(f"{url}/pages", CAPACITY, segment=2 << 20, poll=0.2) as pages:
        tell("opened", 0)
        while True:
            start = int(rng.paretovariate(0.6)) % 2000
            keys = [b"page%d" % number for number in range(start, start + rng.randrange(1, 12))]
            run = pages.exists(keys)
            wanted = [page_of(key) for key in keys]
            buffers = [bytearray(len(page)) for page in wanted]
            done = pages.get_into(keys, buffers)
            for key, page, buffer, there in zip(keys, wanted, buffers, done, strict=True):
                if there and page != buffer:
                    tell("WRONG", "another page under", key.decode())
            pages.set_from(keys[run:], wanted[run:], first=run)
            if rng.random() < 0.02:
                stats = pages.stats()
                tell("pages", stats["hits"], stats["misses"], stats["damaged"], stats["bytes"])


def main() -> None:
    role, url, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        {"writer": write, "reader": read, "pages": cache}[role](url, random.Random(seed))
    except Stale:
        tell("stale")
    except StorageError as error:
        tell("damaged" if type(error).__name__ == "Corrupted" else "failed", error)
    except FireflyerError as error:
        tell("failed", error)


if __name__ == "__main__":
    main()
