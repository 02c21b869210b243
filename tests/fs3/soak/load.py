"""A client of a soak: threads that create, write, append, overwrite, read, rename and unlink.

`python -m tests.fs3.soak.load CLUSTER.TOML NUMBER SEED THREADS OUT`: until its stdin ends. Then it writes its
manifest to OUT. Each thread has a directory of its own, so that it alone knows what must be in it.
"""

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from tests.fs3.soak.contents import SHARED, SLOT, Manifest, Record, Sample

from fireflyer.errors import FireflyerError
from fireflyer.fs3.client import Client, Settings
from fireflyer.fs3.client.discovery import attach
from fireflyer.fs3.config import load

SIZES = (1, 100, 4096, 5000, 65_536, 200_001, 300_000, 1 << 20, (3 << 20) + 5)
FILES = 24
FILE_BYTES = 6 << 20
WRITES = 30
KINDS = ("create", "overwrite", "append", "read", "rename", "unlink", "look", "share")
WEIGHTS = (4, 6, 6, 10, 2, 2, 1, 6)
SLOTS = 20
WRITERS = 16


class Worker:
    """One thread's files. An operation that raises leaves its file in doubt: it is not touched again."""

    def __init__(self, client: Client, folder: str, writer: int, seed: int, chunk: int) -> None:
        """`writer`: one of 0..WRITERS - 1, whose parts of the shared file are its own."""
        self.client, self.folder, self.chunk = client, folder, chunk
        self.shared = client.open(SHARED, "ab+")
        self.slots = [Record((seed << 20) + (1 << 19) + k, [SHARED]) for k in range(SLOTS)]
        self.places = [(k * WRITERS + writer) * SLOT for k in range(SLOTS)]
        self.chance = random.Random(seed)
        self.base = seed << 20
        self.count = 0
        self.live: list[Record] = []
        self.doubtful: list[Record] = []
        self.samples: list[Sample] = []
        self.lost: list[str] = []
        self.written = self.read_bytes = 0

    def share(self) -> None:
        """Writes a part of a file in whose chunks others write too, or reads it."""
        at = self.chance.randrange(SLOTS)
        slot, offset = self.slots[at], self.places[at]
        if slot.pending:
            return
        if slot.writes and self.chance.random() < 0.4:
            seen = np.frombuffer(self.shared.pread(SLOT, offset), np.uint8)
            wrong = slot.wrong(seen, self.chunk, offset)
            if wrong or len(seen) != SLOT:
                self.lost.append(f"slot at {offset}: {len(seen)} bytes, {wrong}")
            return
        self.shared.pwrite(slot.plan(offset, SLOT), offset)
        self.shared.fsync()
        slot.writes.clear()
        self._wrote(slot)
        slot.length = slot.end

    def run(self, stop: threading.Event) -> None:
        """Each kind once, whatever happens, and then any of them."""
        for kind in ("create", "create", *KINDS):
            if self.live or kind in ("create", "share"):
                self._timed(kind, getattr(self, kind))
        while not stop.is_set():
            kind = self.chance.choices(KINDS, WEIGHTS)[0]
            if kind not in ("create", "share") and not self.live:
                kind = "create"
            elif kind == "create" and len(self.live) >= FILES:
                kind = "unlink"
            self._timed(kind, getattr(self, kind))

    def _timed(self, kind: str, operation: Callable[[], None]) -> None:
        begun, error = time.monotonic(), ""
        try:
            operation()
        except (FireflyerError, OSError) as failed:
            error = type(failed).__name__
            print(f"{self.folder}: {kind}: {failed!r}", file=sys.stderr, flush=True)
            if isinstance(failed, FileNotFoundError | FileExistsError):
                self.lost.append(f"{self.folder}: {kind}: {failed}")
        self.samples.append(Sample(kind, begun, time.monotonic(), error))
        doubtful = [record for record in self.live if record.doubtful]
        self.live = [record for record in self.live if not record.doubtful]
        self.doubtful += doubtful
        if error == "NoSpace" and doubtful and self.chance.random() < 0.9:
            self._timed("make room", self._make_room)

    def _make_room(self) -> None:
        """Removes the file that could not be written."""
        record = self.doubtful[-1]
        with contextlib.suppress(FileNotFoundError):  # it may not have been made
            self.client.unlink(record.name)
        self.doubtful.pop()

    def _new_name(self) -> str:
        self.count += 1
        return f"{self.folder}/f{self.count}"

    def _pick(self) -> Record:
        return self.chance.choice(self.live)

    def create(self) -> None:
        name = self._new_name()
        record = Record(self.base + self.count, [name], may_be_gone=True)
        self.live.append(record)
        with self.client.open(name, "xb") as file:
            record.may_be_gone = False
            for _ in range(self.chance.randrange(3)):
                data = record.plan(record.end, self.chance.choice(SIZES))
                file.write(data)
                self._wrote(record)
        record.length = record.end

    def _wrote(self, record: Record) -> None:
        assert record.pending
        self.written += record.pending.size
        record.acknowledged()

    def overwrite(self) -> None:
        record = self._pick()
        if len(record.writes) > WRITES:
            return self._unlink(record)
        offset = self.chance.randrange(record.end + 1)
        size = min(self.chance.choice(SIZES), FILE_BYTES - offset)
        with self.client.open(record.name, "rb+") as file:
            if file.size != record.end:
                self.lost.append(f"{record.name}: opened with {file.size} bytes, not {record.end}")
            data = record.plan(offset, max(1, size))
            file.pwrite(data, offset)
            self._wrote(record)
            if self.chance.random() < 0.3:
                file.fsync()
                record.length = record.end
        record.length = record.end

    def append(self) -> None:
        record = self._pick()
        if record.end > FILE_BYTES or len(record.writes) > WRITES:
            return self._unlink(record)
        with self.client.open(record.name, "ab") as file:
            for _ in range(self.chance.randint(1, 3)):
                data = record.plan(record.end, self.chance.choice(SIZES))
                file.write(data)
                self._wrote(record)
        record.length = record.end

    def read(self) -> None:
        record = self._pick()
        offset = self.chance.choice((0, self.chance.randrange(record.end + 1)))
        with self.client.open(record.name) as file:
            if file.size != record.end:
                self.lost.append(f"{record.name}: opened with {file.size} bytes, not {record.end}")
            seen = np.frombuffer(file.pread(file.size, offset), np.uint8)
        self.read_bytes += len(seen)
        wrong = record.wrong(seen, self.chunk, offset)
        if len(seen) != record.end - offset:
            wrong = f"{len(seen)} bytes at {offset} were read, not {record.end - offset}"
        if wrong:
            self.lost.append(f"{record.name}: {wrong}")

    def rename(self) -> None:
        record = self._pick()
        other = self._pick()
        replaced = None if other is record or self.chance.random() < 0.7 else other
        old, new = record.name, replaced.name if replaced else self._new_name()
        record.names = [old, new]
        if replaced:
            replaced.under = old
        self.client.rename(old, new)
        record.names = [new]
        if replaced:
            self.live.remove(replaced)

    def unlink(self) -> None:
        self._unlink(self._pick())

    def _unlink(self, record: Record) -> None:
        record.may_be_gone = True
        self.client.unlink(record.name)
        self.live.remove(record)

    def look(self) -> None:
        """The directory has the names that it must have, and the files their lengths."""
        seen = {f"{self.folder}/{name}" for name in self.client.listdir(self.folder)}
        known = {record.name for record in self.live}
        allowed = {name for record in self.doubtful for name in record.names}
        if not known <= seen or not seen <= known | allowed:
            self.lost.append(f"{self.folder}: names {sorted(seen ^ known)} are there or missing")
        if self.live:
            record = self._pick()
            size = self.client.stat(record.name).st_size
            if size != record.end:
                self.lost.append(f"{record.name}: {size} bytes long, not {record.end}")


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A thread that ended by itself would only seem to find nothing."""
    sys.__excepthook__(failed.exc_type, failed.exc_value or SystemExit(), failed.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def main() -> int:
    config, number, seed, threads, out = sys.argv[1:]
    folder = f"/c{number}"
    settings = Settings(deadline_s=120.0, local=False)  # hosts of the lab share the machine
    stop = threading.Event()
    chunk = load(Path(config)).chunk_kib << 10
    with attach(config, settings=settings) as client:
        workers = []
        for n in range(int(threads)):
            client.makedirs(f"{folder}/{n}", exist_ok=True)
            writer = int(number) * int(threads) + n
            own = f"{folder}/{n}"
            workers.append(Worker(client, own, writer, int(seed) * WRITERS + writer, chunk))
        running = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
        threading.excepthook = _end_process
        for thread in running:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        stop.set()
        for thread in running:
            thread.join()
        for worker in workers:
            worker.shared.close()
    manifest = Manifest(
        [worker.folder for worker in workers],
        [record for worker in workers for record in [*worker.live, *worker.doubtful]],
        [slot for worker in workers for slot in worker.slots],
        [sample for worker in workers for sample in worker.samples],
        [text for worker in workers for text in worker.lost],
        sum(worker.written for worker in workers),
        sum(worker.read_bytes for worker in workers),
    )
    Path(out).write_bytes(msgspec.msgpack.encode(manifest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
