"""Cases of the store: YCSB against RocksDB, opening, visibility in another process."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from fireflyer import kv
from fireflyer.bench.fs.cluster import FileSystem
from fireflyer.bench.fs.context import Setting, at_most
from fireflyer.bench.harness.command_process import TimedProcess
from fireflyer.bench.harness.report import Row
from fireflyer.bench.kv import ycsb
from fireflyer.errors import PeerLost

CALLERS = 64
MIB = 1 << 20


def workloads(setting: Setting, records: int, operations: int) -> list[Row]:
    """Measures YCSB A, B and C with 64 callers; updates are durable."""
    folder = setting.work / "ycsb"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = Path(ycsb.__file__)
    rows = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        files = stack.enter_context(FileSystem(folder / "fs3"))
        python = setting.spec.peers / "rocksdict" / "bin" / "python"
        places: dict[str, list[str | Path]] = {
            "ours": [sys.executable, script, "fireflyer", folder / "ours"],
            "fs3": [sys.executable, script, "fireflyer", _url(files, "db")],
        }
        if python.exists():
            places["rocksdict"] = [python, script, "rocksdict", folder / "rocks"]
        stores = {}
        for name, command in places.items():
            setting.say(f"YCSB: loading {name}")
            process = TimedProcess(f"runs {name}", [*command, str(records)])
            stores[name] = stack.enter_context(process)
            stores[name].seconds("C 1 1")  # answered after loading
        for workload in "ABC":
            count = operations if workload == "A" else 4 * operations
            line = f"{workload} {CALLERS} {count}"
            found = setting.rounds(
                f"YCSB {workload}",
                {name: _rate(store, line, count) for name, store in stores.items()},
            )
            peer = found.get("rocksdict", [])
            title = "rocksdict, sync" if peer else "rocksdict is not installed"
            case = f"YCSB {workload}, {CALLERS} callers"
            rows.append(Row.of_speeds(case, "op/s", found["ours"], title, peer, (), 0.5, 0.9))
            rows.append(Row.of_speeds(f"{case}, on fs3", "op/s", found["fs3"], title, peer))
    return rows


def _url(files: FileSystem, name: str) -> str:
    """Returns the URL of a folder; sets the environment so that later processes find the file
    system."""
    os.environ["FIREFLYER_FS"] = files.where
    return f"fs3:///{name}"


def _rate(store: TimedProcess, line: str, count: int) -> Callable[[], float]:
    return lambda: count / store.seconds(line)


def opening(setting: Setting, size: int) -> list[Row]:
    """Measures the time from `kv.open` to the first value, with a store of `size` bytes."""
    folder = setting.work / "large"
    shutil.rmtree(folder, ignore_errors=True)
    value = ycsb.VALUE * 65
    count = size // len(value)
    setting.say(f"open: writing {size / 1e9:.1f} GB")
    with kv.open(folder, write=True, memtable=256 * MIB) as store:
        for at in range(0, count, 16):
            with store.batch() as batch:
                for number in range(at, min(at + 16, count)):
                    batch.put(ycsb.key_of(number), value)
        store.put(b"last", b"1")
    times = {"write": [], "read": []}  # type: dict[str, list[float]]
    for turn in range(2 * setting.spec.rounds + 1):
        for kind in times:
            began = time.perf_counter()
            store_ = kv.open(folder, write=True) if kind == "write" else kv.open(folder, poll=0)
            found = store_.get(ycsb.key_of(turn * 7919 % count))
            times[kind].append(1e3 * (time.perf_counter() - began))
            store_.close()
            if found != value:
                raise PeerLost("the store lost a value")
    shutil.rmtree(folder)
    case = f"open of {size / (1 << 30):.3g} GiB to first get"
    return [
        at_most(f"{case}, {kind}", "ms", statistics.median(each), "most", 200)
        for kind, each in times.items()
    ]


def visible(setting: Setting, writes: int) -> list[Row]:
    """Measures the time from the return of `put` until another process sees the write."""
    rows = []
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "seen-fs3"))
        folder = setting.work / "seen"
        shutil.rmtree(folder, ignore_errors=True)
        stack.callback(shutil.rmtree, folder)
        for name, url in (("folder", str(folder)), ("fs3", _url(files, "seen"))):
            setting.say(f"seen: {name}")
            delays = sorted(_delays(url, writes))
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                value = 1e3 * delays[int(share * (len(delays) - 1))]
                rows.append(
                    at_most(f"write seen elsewhere, {name}, {label}", "ms", value, "most", 100)
                )
    return rows


def _delays(url: str, writes: int) -> list[float]:
    delays = []
    with kv.open(url, write=True) as store:
        store.put(b"seen", b"begin")
        command = [sys.executable, "-m", "fireflyer.bench.kv.watch", url]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            out = reader.stdout
            assert out is not None
            if out.readline().split()[:1] != ["ready"]:
                raise PeerLost("the reading process ended")
            for number in range(writes):
                store.put(b"seen", b"%d" % number)
                returned = time.monotonic()
                value, seen = out.readline().split()
                if int(value) != number:
                    raise PeerLost(f"the reader saw {value} instead of {number}")
                delays.append(max(1e-6, float(seen) - returned))
                time.sleep(0.003 * (number % 7))
            store.put(b"seen", b"end")
        finally:
            reader.kill()
            reader.wait()
    return delays
