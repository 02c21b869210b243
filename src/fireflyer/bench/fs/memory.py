"""Memory cases of `fireflyer bench fs`: a chunk's index, the metadata of many files, a client."""

import random
from contextlib import ExitStack

from fireflyer._native.fs3 import store
from fireflyer.bench.fs.cluster import FileSystem
from fireflyer.bench.fs.context import BLOCK, PAGE, Setting, at_most
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.errors import FileError, StorageError
from fireflyer.fs3.client import Client, Settings

_MIB = 1 << 20
_EXTEND = store.kinds().index("extend")
_A_DIRECTORY = 10_000
_A_CALL = 1000
_READERS = 8


def memory(setting: Setting) -> list[Row]:
    """Measures a chunk's index, the resident memory with many files, and a client's own memory."""
    return [_index(setting), *_metadata(setting), _client(setting)]


def _index(setting: Setting) -> Row:
    """Measures the memory of the index per chunk.

    Chunks arrive in random order, which leaves the most unused space in the index.
    """
    count = setting.sizes.files // 4
    setting.say(f"index of {count:,} chunks")
    chunks = store.Store(store.SimDisk(1))
    order = list(range(count))
    random.Random(3).shuffle(order)
    for done, number in enumerate(order):
        status = chunks.apply(done, number >> 8, number & 0xFF, 0, 1, 1, _EXTEND, committed=True)
        if status:
            raise StorageError(f"cannot create a chunk: {store.statuses()[status]}")
        if done % 1024 == 1023:
            chunks.sync()
    chunks.sync()
    found = chunks.statistics()
    chunks.close()
    each = found["index_bytes"] / found["chunks"]
    return at_most("index of a chunk", "B", each, "asked: at most", goals.INDEX_BYTES)


def _metadata(setting: Setting) -> list[Row]:
    """Measures the memory of the process of manager and metadata. Another process holds the
    chunks."""
    files = setting.sizes.files
    with FileSystem(setting.work / "memory", nodes=1) as system, system.attach() as client:
        fill(client, files, setting)
        most = system.services[0].most_resident() / _MIB
    case = f"manager and meta, {files:,} files"
    return [at_most(case, "MiB", most, "asked: at most", goals.MILLION_MIB)]


def fill(client: Client, files: int, setting: Setting, first: int = 0) -> None:
    """Creates empty files, 10,000 per directory, and stats each once.

    Args:
        files: number of files afterwards.
        first: number of files that already exist.
    """
    for at in range(first, files, _A_CALL):
        directory = f"/d{at // _A_DIRECTORY}"
        if at % _A_DIRECTORY == 0:
            client.mkdir(directory)
        names = [f"file-{number}" for number in range(at, min(at + _A_CALL, files))]
        for made in client.create_many(directory, names):
            if isinstance(made, FileError):
                raise made
        client.stat_many([f"{directory}/{name}" for name in names])
        if at % 100_000 == 0:
            setting.say(f"{at:,} of {files:,} files")


def _client(setting: Setting) -> Row:
    """Measures a client's memory beyond its callers' buffers.

    The limit is the client's window: one block per caller, for as many callers as may transfer at a
    time.
    """
    case = f"client beyond its callers' memory, {_READERS} readers"
    with ExitStack() as stack:
        system = stack.enter_context(FileSystem(setting.work / "client", nodes=1))
        client = stack.enter_context(system.attach())
        setting.say(case)
        setting.put(client, "/data")
        worker = stack.enter_context(system.worker("client"))
        command = {
            "do": "stream", "path": "/data", "block": BLOCK, "threads": _READERS, "rounds": 1,
        }  # fmt: skip
        beyond = max(float(PAGE), worker.ask(command)["beyond"])
    window = min(_READERS, Settings().lanes) * BLOCK / _MIB
    return at_most(case, "MiB", beyond / _MIB, "window in flight", window)
