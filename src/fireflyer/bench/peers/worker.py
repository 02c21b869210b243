"""One peer of `fireflyer bench records`, in a process of the peer's environment.

The process does not import our code. It starts as `python worker.py PEER`. Each line of standard
input is a JSON object; each gets one line as the answer:
  {"do": "hello"}                              -> {"version", "views", "verifies", "sequential"}
  {"do": "prepare", "raw": DIR, "work": DIR}   -> {"bytes"}        writes the peer's format once
  {"do": "round", "work": DIR, "indices": FILE, "batch": B, "cold": BOOL, "views": BOOL}
                                               -> {"seconds", "bytes"}
  or {"error": TEXT}.

The process exits at the end of its input. Opening is not timed. From a view, one byte per page is
read.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

PAGE = 4096
KEY = "{:012d}"


class Peer:
    """Interface and defaults of all peers; a peer overrides write, open and batch."""

    package = ""
    views = False
    """True if the peer can return views of its mapped memory instead of copies."""
    verifies = False
    """True if the peer compares checksums of the data that it reads."""
    sequential = False
    """True if the peer reads samples only in the stored order, whatever indices are requested."""

    def write(self, samples: Iterator[bytes], count: int, work: Path) -> None:
        raise TypeError(f"{type(self).__name__} cannot write")

    def open(self, work: Path, views: bool) -> Any:
        raise TypeError(f"{type(self).__name__} reads nothing")

    def batch(self, handle: Any, indices: list[int]) -> list[Any]:
        raise TypeError(f"{type(self).__name__} reads nothing")

    def close(self, handle: Any) -> None:
        """Releases maps and files, so that the cache can be dropped."""


class ArrayRecord(Peer):
    package, verifies = "array_record", True

    def write(self, samples: Iterator[bytes], count: int, work: Path) -> None:
        module = import_module("array_record.python.array_record_module")
        writer = module.ArrayRecordWriter(str(work / "data.array_record"), "group_size:1")
        for sample in samples:
            writer.write(sample)
        writer.close()

    def open(self, work: Path, views: bool) -> Any:
        module = import_module("array_record.python.array_record_module")
        return module.ArrayRecordReader(str(work / "data.array_record"), "readahead_buffer_size:0")

    def batch(self, handle: Any, indices: list[int]) -> list[Any]:
        found: list[Any] = handle.read(indices)
        return found

    def close(self, handle: Any) -> None:
        handle.close()


class Lmdb(Peer):
    package, views = "lmdb", True

    def write(self, samples: Iterator[bytes], count: int, work: Path) -> None:
        env = import_module("lmdb").open(str(work / "data.lmdb"), map_size=1 << 38, subdir=False)
        with env.begin(write=True) as transaction:
            for number, sample in enumerate(samples):
                transaction.put(KEY.format(number).encode(), sample, append=True)
        env.sync()
        env.close()

    def open(self, work: Path, views: bool) -> Any:
        env = import_module("lmdb").open(
            str(work / "data.lmdb"), readonly=True, lock=False, readahead=False, subdir=False
        )
        return env, env.begin(buffers=views)

    def batch(self, handle: Any, indices: list[int]) -> list[Any]:
        get = handle[1].get
        return [get(KEY.format(index).encode()) for index in indices]

    def close(self, handle: Any) -> None:
        handle[1].abort()
        handle[0].close()


class Mosaic(Peer):
    """MosaicML Streaming, with empty names in place of torchvision.

    Only its image classes use torchvision, whose wheel must match the build of torch (CPU or CUDA).
    Not every machine has such a wheel.
    """

    package = "mosaicml-streaming"

    def __init__(self) -> None:
        names: dict[str, dict[str, Any]] = {
            "torchvision": {},
            "torchvision.datasets": {"VisionDataset": object},
            "torchvision.transforms": {},
            "torchvision.transforms.functional": {"to_tensor": None},
        }
        for name, content in names.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(content, __spec__=ModuleSpec(name, None))

    def write(self, samples: Iterator[bytes], count: int, work: Path) -> None:
        writer = import_module("streaming").MDSWriter
        with writer(out=str(work / "mds"), columns={"data": "bytes"}, size_limit="64mb") as out:
            for sample in samples:
                out.write({"data": sample})

    def open(self, work: Path, views: bool) -> Any:
        return import_module("streaming").LocalDataset(local=str(work / "mds"))

    def batch(self, handle: Any, indices: list[int]) -> list[Any]:
        return [handle[index]["data"] for index in indices]


class Lance(Peer):
    package = "pylance"

    def write(self, samples: Iterator[bytes], count: int, work: Path) -> None:
        arrow = import_module("pyarrow")
        schema = arrow.schema([("data", arrow.large_binary())])

        def batches() -> Iterator[Any]:
            held: list[bytes] = []
            for sample in samples:
                held.append(sample)
                if len(held) == 1024:
                    yield arrow.record_batch([arrow.array(held, arrow.large_binary())], schema)
                    held = []
            if held:
                yield arrow.record_batch([arrow.array(held, arrow.large_binary())], schema)

        import_module("lance").write_dataset(batches(), str(work / "data.lance"), schema)

    def open(self, work: Path, views: bool) -> Any:
        return import_module("lance").dataset(str(work / "data.lance"))

    def batch(self, handle: Any, indices: list[int]) -> list[Any]:
        column = handle.take(indices, columns=["data"]).column("data")
        return [cell.as_buffer() for chunk in column.chunks for cell in chunk]


class WebDataset(Peer):
    package, sequential = "webdataset", True

    def write(self, samples: Iterator[bytes], count: int, work: Path) -> None:
        with import_module("webdataset").TarWriter(str(work / "data.tar")) as out:
            for number, sample in enumerate(samples):
                out.write({"__key__": KEY.format(number), "bin": sample})

    def open(self, work: Path, views: bool) -> Any:
        data = import_module("webdataset").WebDataset(str(work / "data.tar"), shardshuffle=False)

        def again_and_again() -> Iterator[Any]:
            while True:
                yield from data

        return again_and_again()

    def batch(self, handle: Any, indices: list[int]) -> list[Any]:
        return [next(handle)["bin"] for _ in indices]

    def close(self, handle: Any) -> None:
        handle.close()


PEERS: dict[str, type[Peer]] = {
    "array_record": ArrayRecord,
    "lmdb": Lmdb,
    "mosaicml-streaming": Mosaic,
    "pylance": Lance,
    "webdataset": WebDataset,
}


def raw_samples(raw: Path) -> tuple[Iterator[bytes], int]:
    """Returns the samples of raw.bin and their number."""
    offsets = np.load(raw / "offsets.npy").tolist()
    data = np.memmap(raw / "raw.bin", np.uint8, "r")
    pairs = pairwise(offsets)
    return (data[start:end].tobytes() for start, end in pairs), len(offsets) - 1


def prepare(peer: Peer, raw: Path, work: Path) -> dict[str, Any]:
    done = work / "written"
    if not done.exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        samples, count = raw_samples(raw)
        peer.write(samples, count, work)
        done.write_text("")
    files = [path for path in work.rglob("*") if path.is_file()]
    return {"bytes": sum(path.stat().st_size for path in files)}


def drop_cache(work: Path) -> None:
    """Writes back every page of the files below `work` and drops it from the page cache."""
    for path in work.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def measure(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    work = Path(command["work"])
    indices: list[int] = np.load(command["indices"]).tolist()
    size, views = command["batch"], bool(command["views"])
    if command["cold"]:
        drop_cache(work)
    handle = peer.open(work, views)
    read = 0
    began = time.perf_counter()
    for start in range(0, len(indices), size):
        for sample in peer.batch(handle, indices[start : start + size]):
            read += len(sample)
            if views:
                np.frombuffer(sample, np.uint8)[::PAGE].sum()
    seconds = time.perf_counter() - began
    peer.close(handle)
    return {"seconds": seconds, "bytes": read}


def answer(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "hello":
        return {
            "version": metadata.version(peer.package),
            "views": peer.views,
            "verifies": peer.verifies,
            "sequential": peer.sequential,
        }
    if command["do"] == "prepare":
        return prepare(peer, Path(command["raw"]), Path(command["work"]))
    return measure(peer, command)


def main() -> None:
    # Libraries may print to stdout, so the answers use a separate descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = PEERS[sys.argv[1]]()
    for line in sys.stdin:
        try:
            reply = answer(peer, json.loads(line))
        except Exception as error:  # noqa: BLE001  # sent to the parent, in one line
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
