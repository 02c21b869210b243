"""Save groups of the checkpoint benchmark: stall, total time, overlapped mode, training speed."""

import shutil
from collections.abc import Callable

from fireflyer.bench.checkpoint.cases import (
    Dcp,
    DcpAsync,
    Ours,
    Safetensors,
    Saved,
    Saver,
    TorchSave,
)
from fireflyer.bench.checkpoint.context import Place, Setting, at_most
from fireflyer.bench.checkpoint.jobs import Computing, Overlapped, all_cores
from fireflyer.bench.checkpoint.limits import Memcpy, RawFile
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.errors import ConfigError

_MS = 1e3


def stall(setting: Setting) -> list[Row]:
    """Compares the stall of `save` with the asynchronous peer's, and with a memcpy of its bytes."""
    return [row for place in setting.places for row in _stall_at(setting, place)]


def _stall_at(setting: Setting, place: Place) -> list[Row]:
    case = setting.case("stall of a save", place)
    ours, peer = Ours(setting.new_folder(place)), DcpAsync(setting.new_folder(place))
    try:
        with Memcpy(setting.bytes) as memcpy:
            found = setting.rounds(
                {
                    "ours": _saving(setting, ours),
                    "dcp": _saving(setting, peer),
                    "memcpy": lambda: Saved(memcpy(), 0),
                }
            )
    finally:
        ours.close()
        peer.close()
    stalls = {name: [each.stall * _MS for each in times] for name, times in found.items()}
    totals = {name: [each.total * _MS for each in times] for name, times in found.items()}
    limit, theirs = stalls["memcpy"], stalls["dcp"]
    to_memcpy, to_dcp = (goals.checkpoint("stall", who) for who in ("memcpy", "dcp.async_save"))
    return [
        Row.of_times(case, "ms", stalls["ours"], memcpy.title, limit, limit, to_memcpy),
        Row.of_times(case, "ms", stalls["ours"], peer.title, theirs, limit, to_dcp),
        Row.of_times(
            setting.case("save until durable", place),
            *("ms", totals["ours"], peer.title, totals["dcp"]),
        ),
    ]


def total(setting: Setting) -> list[Row]:
    """Measures the time until a save is durable. Only disks have a limit: raw writes."""
    return [row for place in setting.places for row in _total_at(setting, place)]


def _total_at(setting: Setting, place: Place) -> list[Row]:
    case = setting.case("save until durable", place)
    ours = Ours(setting.new_folder(place))
    savers: dict[str, Saver] = {
        peer.title: peer
        for peer in (Dcp(setting.new_folder(place)), TorchSave(setting.new_folder(place)))
    }
    missing = []
    try:
        tensors = Safetensors(setting.new_folder(place))
        savers[tensors.title] = tensors
    except ConfigError as error:
        missing.append(str(error))
    candidates = {name: _saving(setting, saver) for name, saver in savers.items()}
    candidates["ours"] = _saving(setting, ours)
    raw = RawFile(setting.new_folder(place), setting.bytes)
    if not place.in_memory:
        candidates["raw"] = lambda: Saved(0, raw.write())
    try:
        found = setting.rounds(candidates)
    finally:
        ours.close()
        raw.close()
    times = {name: [each.total * _MS for each in taken] for name, taken in found.items()}
    mine, limit = times.pop("ours"), times.pop("raw", [])
    rows = [Row.of_times(case, "ms", mine, name, theirs, limit) for name, theirs in times.items()]
    rows += [Row.of_times(case, "ms", mine, why, [], limit) for why in missing]
    if limit:
        goal = goals.checkpoint("total", "raw")
        rows.append(Row.of_times(case, "ms", mine, f"{raw.title} write", limit, limit, goal))
    return rows


def _saving(setting: Setting, saver: Saver) -> Callable[[], Saved]:
    """Returns a function that saves the state once and removes the result."""

    def run() -> Saved:
        try:
            return saver.save(setting.state)
        finally:
            saver.clear()

    return run


def overlap(setting: Setting) -> list[Row]:
    """Measures the overlapped mode's stall in a job with sleeping steps: in `save` and before the
    optimizer."""
    rows = []
    for place in setting.places:
        case = setting.case("overlapped save", place)
        folder = setting.new_folder(place)
        try:
            job = Overlapped(folder, setting.state)
            blocked = setting.rounds({"ours": job.step})["ours"]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows.append(at_most(case, "ms", [each * _MS for each in blocked], goals.BLOCKED_MS))
    return rows


def training(setting: Setting) -> list[Row]:
    """Measures steps per second of a job on all cores, in two kinds of phases: one starts with a
    save, the other has no save."""
    every = setting.spec.every_s
    place = setting.disk
    case = setting.case(f"computing, a save each {every:g} s", place)
    ours, job = Ours(setting.new_folder(place)), Computing()

    def saved() -> float:
        ours.begin(setting.state)
        return job.steps_per_second(every)

    try:
        with all_cores():
            found = setting.rounds({"ours": saved, "none": lambda: job.steps_per_second(every)})
    finally:
        ours.close()
    goal = 1 - goals.SLOW_DOWN
    return [Row.of_rates(case, "steps/s", found["ours"], "no saves", found["none"], goal)]
