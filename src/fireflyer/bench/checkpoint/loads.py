"""Load groups of the checkpoint benchmark: a whole state, one tensor, and the memory use."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fireflyer.bench.checkpoint import state as states
from fireflyer.bench.checkpoint.cases import Dcp, Loaded, Ours, Safetensors, Saver, TorchSave
from fireflyer.bench.checkpoint.context import Place, Setting, at_most
from fireflyer.bench.checkpoint.limits import Memcpy, RawFile
from fireflyer.bench.checkpoint.memory import in_a_new_process
from fireflyer.bench.checkpoint.state import State
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.report import Row
from fireflyer.bench.records.data import drop_cache
from fireflyer.errors import CheckpointError, ConfigError

_MS = 1e3
_INTO, _NEW = "load(into=)", "load()"


class Way(NamedTuple):
    """Method by which a peer loads.

    Attributes:
        against: our equivalent method.
        goal: the peer's name in goals.py, if there is a goal.
    """

    against: str
    title: str
    load: Callable[[], Loaded]
    goal: str | None = None


class Limit(NamedTuple):
    """Minimum time that the machine needs for the same bytes."""

    title: str
    seconds: Callable[[], float]


def load(setting: Setting) -> list[Row]:
    """Measures verified loads of a whole state: cold from disks, warm from tmpfs. Only one peer has
    files at a time, to save space."""
    rows = []
    for place in setting.places:
        ours = Ours(setting.new_folder(place))
        raw = RawFile(setting.new_folder(place), setting.bytes)
        try:
            ours.save(setting.state)
            ours.release()
            if place.in_memory:
                with Memcpy(setting.bytes) as memcpy:
                    rows += _loads_at(setting, place, ours, Limit(memcpy.title, memcpy))
            else:
                raw.write()
                rows += _loads_at(setting, place, ours, Limit(f"{raw.title} read", raw.read))
        finally:
            ours.close()
            raw.close()
    return rows


def _loads_at(setting: Setting, place: Place, ours: Ours, limit: Limit) -> list[Row]:
    state = setting.state
    dcp, saved = Dcp(setting.new_folder(place)), TorchSave(setting.new_folder(place))
    ways = [Way(_INTO, "dcp.load", _into(state, dcp.load_into), "dcp")]
    rows = _against(setting, place, ours, dcp, ways, limit, with_limit=True)
    ways = [Way(_NEW, "torch.load", saved.load)]
    rows += _against(setting, place, ours, saved, ways, limit)
    try:
        tensors = Safetensors(setting.new_folder(place))
    except ConfigError as error:
        return [*rows, *_without_peer(setting, place, ours, str(error))]
    ways = [
        Way(_INTO, "load_file, copied", _into(state, tensors.load_into), "safetensors"),
        Way(_NEW, 'load_file(backend="pread")', tensors.load, "safetensors"),
        Way(_NEW, "load_file, mapped, touched", tensors.load_mapped),
    ]
    return rows + _against(setting, place, ours, tensors, ways, limit)


def _against(
    setting: Setting,
    place: Place,
    ours: Ours,
    peer: Saver,
    ways: Sequence[Way],
    limit: Limit,
    *,
    with_limit: bool = False,
) -> list[Row]:
    """Returns a row for each method of a peer. If `with_limit`, a row for the limit comes first."""
    candidates = {
        name: _loading(setting, mine, ours.folder)
        for name, mine in _ways_of(setting, ours).items()
        if name in [way.against for way in ways]
    }
    for way in ways:
        candidates[way.title] = _loading(setting, way.load, peer.folder)
    candidates[limit.title] = limit.seconds
    try:
        peer.save(setting.state)
        found = setting.rounds(candidates)
    finally:
        peer.clear()
    times = {name: [seconds * _MS for seconds in taken] for name, taken in found.items()}
    word = "warm" if place.in_memory else "cold"
    compared = [(way.against, way.title, way.goal) for way in ways]
    if with_limit:
        compared.insert(0, (ways[0].against, limit.title, "raw"))
    rows = []
    for mine, title, goal in compared:
        asked = None if goal is None else goals.checkpoint(f"{word} load", goal)
        case = setting.case(f"{word} {mine}", place)
        rows.append(
            Row.of_times(case, "ms", times[mine], title, times[title], times[limit.title], asked)
        )
    return rows


def _without_peer(setting: Setting, place: Place, ours: Ours, why: str) -> list[Row]:
    rows = []
    for name, mine in _ways_of(setting, ours).items():
        found = setting.rounds({"ours": _loading(setting, mine, ours.folder)})
        case = setting.case(f"{'warm' if place.in_memory else 'cold'} {name}", place)
        rows.append(Row.of_times(case, "ms", [s * _MS for s in found["ours"]], why, []))
    return rows


def _ways_of(setting: Setting, ours: Ours) -> dict[str, Callable[[], Loaded]]:
    return {_INTO: _into(setting.state, ours.load_into), _NEW: ours.load}


def _into(state: State, load: Callable[[State], Loaded]) -> Callable[[], Loaded]:
    """Returns a function that erases the state and loads into it."""

    def run() -> Loaded:
        states.erase(state)
        return load(state)

    return run


def _loading(setting: Setting, load: Callable[[], Loaded], folder: Path) -> Callable[[], float]:
    """Returns a function that drops `folder` from the page cache and measures one load, in seconds.

    Raises:
        CheckpointError: raised by that function if the loaded bytes differ from the saved bytes.
    """
    wanted = states.checksums(setting.state)

    def run() -> float:
        drop_cache(folder)
        loaded = load()
        if states.checksums(loaded.tree) != wanted:
            raise CheckpointError(
                f"bench checkpoint: the bytes loaded from {folder} differ from the saved bytes"
            )
        return loaded.seconds

    return run


def one(setting: Setting) -> list[Row]:
    """Loads one tensor of 1 MiB from a state in memory.

    Raises:
        CheckpointError: the loaded tensor differs from the saved tensor.
    """
    place = setting.memory
    case = setting.case(f"{size_text(states.ONE_BYTES)} tensor, warm", place)
    ours = Ours(setting.new_folder(place))
    wanted = states.checksums(setting.state["model"]["rope"])

    def run() -> float:
        loaded = ours.load_one(states.ONE)
        if states.checksums(loaded.tree) != wanted:
            raise CheckpointError(
                f"bench checkpoint: the loaded {states.ONE} differs from the saved tensor"
            )
        return loaded.seconds

    try:
        ours.save(setting.state)
        ours.release()
        taken = setting.rounds({"ours": run})["ours"]
    finally:
        ours.close()
    return [at_most(case, "ms", [seconds * _MS for seconds in taken], goals.ONE_TENSOR_MS)]


def memory(setting: Setting) -> list[Row]:
    """Measures the memory that a process needs in addition.

    For a save, the value is relative to the size of the state. For load(into=), it is in MiB.
    """
    place, spec = setting.disk, setting.spec
    case = setting.case("memory of a save / state", place)
    folder = setting.new_folder(place)
    try:
        found = in_a_new_process(folder, spec.size, spec.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    page = 4096
    saving = [max(added, page) / found.state for added in found.saving]
    loading = [max(added, page) / 2**20 for added in found.loading]
    return [
        at_most(case, "x", saving, goals.STAGING),
        at_most(setting.case(f"memory of {_INTO}", place), "MiB", loading, goals.BEYOND_MIB),
    ]
