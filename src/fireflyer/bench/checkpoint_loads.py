"""Groups of the checkpoint benchmark that load: a whole state, one tensor; and what memory it takes."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fireflyer.bench import checkpoint_state as states
from fireflyer.bench import goals
from fireflyer.bench.checkpoint_cases import Dcp, Loaded, Ours, Safetensors, Saver, TorchSave
from fireflyer.bench.checkpoint_limits import Memcpy, RawFile
from fireflyer.bench.checkpoint_memory import in_a_new_process
from fireflyer.bench.checkpoint_setting import Place, Setting, at_most
from fireflyer.bench.checkpoint_state import State
from fireflyer.bench.options import size_text
from fireflyer.bench.records_data import drop_cache
from fireflyer.bench.report import Row
from fireflyer.errors import CheckpointError, ConfigError

_MS = 1e3
_INTO, _NEW = "load(into=)", "load()"


class Way(NamedTuple):
    """One way of a peer to load.

    Attributes:
        against: the way of ours that does the same.
        goal: the peer's name in goals.py, if something is asked.
    """

    against: str
    title: str
    load: Callable[[], Loaded]
    goal: str | None = None


class Limit(NamedTuple):
    """What the machine needs at least for the same bytes."""

    title: str
    seconds: Callable[[], float]


def load(setting: Setting) -> list[Row]:
    """A whole state, verified: cold from disks, warm from tmpfs; one peer at a time, for the space."""
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
    """A row for each way of a peer; before them one against the limit, if asked for."""
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
    """Loads into the state, which holds nothing of what was saved."""

    def run() -> Loaded:
        states.erase(state)
        return load(state)

    return run


def _loading(setting: Setting, load: Callable[[], Loaded], folder: Path) -> Callable[[], float]:
    """Seconds of one load after the page cache of `folder` was dropped.

    Raises:
        CheckpointError: from the load, if it gave other bytes than were saved.
    """
    wanted = states.checksums(setting.state)

    def run() -> float:
        drop_cache(folder)
        loaded = load()
        if states.checksums(loaded.tree) != wanted:
            raise CheckpointError(f"bench checkpoint: {folder} gave other bytes than were saved")
        return loaded.seconds

    return run


def one(setting: Setting) -> list[Row]:
    """One tensor of 1 MiB out of a state in memory.

    Raises:
        CheckpointError: it is not the tensor that was saved.
    """
    place = setting.memory
    case = setting.case(f"{size_text(states.ONE_BYTES)} tensor, warm", place)
    ours = Ours(setting.new_folder(place))
    wanted = states.checksums(setting.state["model"]["rope"])

    def run() -> float:
        loaded = ours.load_one(states.ONE)
        if states.checksums(loaded.tree) != wanted:
            raise CheckpointError(f"bench checkpoint: {states.ONE} is not what was saved")
        return loaded.seconds

    try:
        ours.save(setting.state)
        ours.release()
        taken = setting.rounds({"ours": run})["ours"]
    finally:
        ours.close()
    return [at_most(case, "ms", [seconds * _MS for seconds in taken], goals.ONE_TENSOR_MS)]


def memory(setting: Setting) -> list[Row]:
    """What a process holds more while it saves, by the state's bytes, and while it loads into tensors."""
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
