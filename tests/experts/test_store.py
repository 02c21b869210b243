"""A store serves the right bytes, and says what it cannot do."""

import os
import threading
from pathlib import Path

import pytest
import torch
from tests.experts.conftest import MIB, OpenStore, state, value_of
from tests.waiting import LIMIT_S

from fireflyer.checkpoint.formats import safetensors
from fireflyer.errors import (
    ConfigError,
    Corrupted,
    DamagedExpert,
    ExpertError,
    ExpertInUse,
    ExpertTooLarge,
    FireflyerError,
    NoSpace,
    NoSuchExpert,
)
from fireflyer.experts import Store, folder, tensors
from fireflyer.experts.events import Place
from fireflyer.storage import open_storage


def images(warm: Path) -> int:
    return sum(name not in ("lock", "stores") for name in os.listdir(warm))


def test_experts_move_between_the_tiers(filled: Store, warm: Path) -> None:
    for number in (0, 1, 0, 2, 3, 1, 1):
        assert value_of(filled, f"e{number}") == number
    stats = filled.stats()
    assert (stats.misses, stats.hot_hits, stats.loads, stats.evictions) == (5, 2, 5, 3)
    assert stats.read_bytes > 5 * MIB
    assert stats.warm_bytes <= 3 * MIB
    assert images(warm) == 2
    assert filled.states()["e1"] is Place.HOT
    filled.close()
    assert not warm.exists()


def test_hinted_experts_are_loaded_beside_the_caller(filled: Store) -> None:
    with filled.get("e0"):
        filled.hint(["e1"])
        filled.wait_idle(LIMIT_S)
        assert filled.states()["e1"] is Place.HOT
    assert value_of(filled, "e1") == 1
    assert (filled.stats().prefetches, filled.stats().misses, filled.stats().hot_hits) == (1, 1, 1)


def test_a_module_on_the_meta_device_takes_the_tensors_without_a_copy(
    open_store: OpenStore,
) -> None:
    store = open_store()
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 32)
    store.add("linear", model.state_dict())
    with torch.device("meta"):
        served = torch.nn.Linear(64, 32)
    with store.get("linear") as expert:
        expert.load_into(served)
        assert served.weight.data_ptr() == expert.tensors["weight"].data_ptr()
        sample = torch.randn(4, 64)
        assert torch.equal(served(sample), model(sample))


def test_tensors_that_outlive_their_block_keep_their_bytes(filled: Store) -> None:
    with filled.get("e0") as expert:
        kept = expert.tensors["w"]
    del expert
    for number in (1, 2, 3, 1, 2, 3):
        assert value_of(filled, f"e{number}") == number
    assert kept.eq(0).all()
    assert filled.states()["e0"] is Place.WARM
    with pytest.raises(ExpertInUse, match="e0"):
        filled.remove("e0")
    del kept
    filled.remove("e0")
    assert filled.names() == ["e1", "e2", "e3"]


def test_writing_to_a_served_tensor_reaches_no_other_store(
    filled: Store, open_store: OpenStore
) -> None:
    other = open_store()
    with filled.get("e2") as expert:
        expert.tensors["w"].fill_(9)
        assert value_of(other, "e2") == 2


def test_two_stores_share_warm_memory_and_its_budget(
    filled: Store, open_store: OpenStore, warm: Path
) -> None:
    other = open_store()
    for number in (0, 1):
        assert value_of(filled, f"e{number}") == number
    assert value_of(other, "e1") == 1
    assert (other.stats().loads, other.stats().warm_hits) == (0, 1)
    with other.get("e1"):
        assert value_of(filled, "e2") == 2  # e0 leaves, though e1 was used before
        assert images(warm) == 2
        assert filled.states()["e0"] is Place.COLD
    filled.close()
    assert value_of(other, "e2") == 2
    assert other.stats().loads == 0


def test_an_expert_that_another_store_evicted_is_loaded_again(open_store: OpenStore) -> None:
    store, other = open_store(hot_bytes="1200K"), open_store()
    for number in range(4):
        store.add(f"e{number}", state(float(number)))
    other.refresh()
    assert value_of(store, "e0") == 0
    assert value_of(store, "e1") == 1  # e0 is only warm now
    assert value_of(other, "e2") == 2  # and leaves
    assert value_of(store, "e0") == 0
    assert store.stats().loads == 3


def test_what_another_store_uses_takes_room(filled: Store, open_store: OpenStore) -> None:
    other = open_store("1200K")
    assert value_of(filled, "e0") == 0
    with pytest.raises(NoSpace, match="use warm memory"), other.get("e3", timeout_s=0.1):
        pass
    filled.remove("e0")
    assert value_of(other, "e3") == 3


def test_a_caller_gets_its_expert_when_another_one_releases_its_own(filled: Store) -> None:
    got = []
    waiter = threading.Thread(target=lambda: got.append(value_of(filled, "e2")))
    with filled.get("e0"), filled.get("e1"):
        with pytest.raises(NoSpace, match="e0, e1 in use"), filled.get("e3", timeout_s=0.1):
            pass
        waiter.start()
    waiter.join(LIMIT_S)
    assert got == [2]


def test_what_cannot_be_served_is_said(filled: Store, open_store: OpenStore) -> None:
    with pytest.raises(NoSuchExpert, match="no expert absent"), filled.get("absent"):
        pass
    with pytest.raises(NoSuchExpert):
        filled.remove("absent")
    filled.add("large", state(5.0, mib=4))
    with pytest.raises(ExpertTooLarge, match="large") as error, filled.get("large"):
        pass
    assert error.value.expert == "large"
    with pytest.raises(ExpertError, match="remove it first"):
        filled.add("e0", state(1.0))
    for name in ("", "../e0", ".hidden", "a b", "x" * 201):
        with pytest.raises(ConfigError, match="invalid name"):
            filled.add(name, state(1.0))
    with filled.get("e0"), pytest.raises(ExpertInUse, match="e0"):
        filled.remove("e0")
    with pytest.raises(ConfigError, match="above zero"):
        open_store(0)
    filled.close()
    with pytest.raises(ExpertError, match="closed"), filled.get("e0"):
        pass


def test_an_expert_added_by_another_process_is_found(filled: Store, tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "experts")
    folder.add(storage, "late", state(7.0))
    assert value_of(filled, "late") == 7
    filled.remove("late")
    folder.add(storage, "late", state(8.0, mib=0.5))
    assert value_of(filled, "late") == 8


def test_an_expert_replaced_while_it_is_cold_is_read_anew(filled: Store, tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "experts")
    folder.remove(storage, "e3")
    folder.add(storage, "e3", state(33.0, mib=0.7))
    assert value_of(filled, "e3") == 33
    folder.remove(storage, "e2")
    with pytest.raises(NoSuchExpert, match="e2"), filled.get("e2"):
        pass


@pytest.mark.parametrize("at", [5, 20, 300_000, -1])
def test_a_damaged_expert_is_named_and_never_served(
    filled: Store, tmp_path: Path, at: int, warm: Path
) -> None:
    path = tmp_path / "experts" / "e1.safetensors"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[at] ^= 4
    path.write_bytes(bad)
    for _ in range(2):
        with pytest.raises(DamagedExpert, match="expert e1 is damaged") as error, filled.get("e1"):
            pass
        assert error.value.expert == "e1"
        assert isinstance(error.value, Corrupted)
    assert filled.states()["e1"] is Place.DAMAGED
    assert value_of(filled, "e0") == 0
    assert images(warm) == 1
    path.write_bytes(good)
    filled.refresh()
    assert value_of(filled, "e1") == 1


@pytest.mark.parametrize("size", [0, 100, 1 * MIB])
def test_a_truncated_expert_or_manifest_is_damaged(
    filled: Store, tmp_path: Path, size: int
) -> None:
    os.truncate(tmp_path / "experts" / "e1.safetensors", size)
    with pytest.raises(DamagedExpert, match="e1"), filled.get("e1"):
        pass
    os.truncate(tmp_path / "experts" / "e2.expert", min(size, 20))
    with pytest.raises(DamagedExpert, match="e2"):
        filled.refresh()


def test_a_folder_is_made_for_the_first_expert_only(tmp_path: Path) -> None:
    place = tmp_path / "new" / "experts"
    bad = tmp_path / "bad.safetensors"
    bad.write_text("this is not such a file")
    with pytest.raises(FireflyerError, match=r"bad\.safetensors"):
        folder.add(str(place), "poet", bad)
    assert os.listdir(tmp_path) == ["bad.safetensors"]
    folder.add(str(place), "poet", state(4.0))
    assert sorted(os.listdir(place)) == ["poet.expert", "poet.safetensors"]


def test_files_of_other_programs_are_packed_where_they_are(tmp_path: Path) -> None:
    place = tmp_path / "experts"
    place.mkdir()
    safetensors.save(state(4.0), place / "four.safetensors")
    (place / "notes.txt").write_text("no expert")
    before = (place / "four.safetensors").stat()
    storage = open_storage(place)
    assert [name for name, _ in folder.pack(storage)] == ["four"]
    assert list(folder.pack(storage)) == []
    assert (place / "four.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    folder.add(storage, "copy", place / "four.safetensors")
    with Store(place, warm_bytes="3M") as store:
        assert value_of(store, "four") == value_of(store, "copy") == 4
    (place / "text.safetensors").write_text("this is not such a file")
    with pytest.raises(Corrupted, match=r"text\.safetensors"):
        list(folder.pack(storage))


def test_tensors_at_odd_places_are_copied(tmp_path: Path) -> None:
    """Other programs pad their header by nothing."""
    entries = '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
    entries += '"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    data = len(entries).to_bytes(8, "little") + entries.encode() + b"abc"
    (tmp_path / "odd.safetensors").write_bytes(data + torch.tensor([1.5, 2]).numpy().tobytes())
    list(folder.pack(open_storage(tmp_path)))
    with Store(tmp_path, warm_bytes="1M") as store, store.get("odd") as expert:
        assert expert.tensors["a"].tolist() == list(b"abc")
        assert expert.tensors["b"].tolist() == [1.5, 2]


def test_a_copy_on_a_device_has_the_same_tensors(filled: Store, tmp_path: Path) -> None:
    import mmap

    with (tmp_path / "experts" / "e3.safetensors").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = tensors.views(mapping, "e3", torch.device("meta"))
    with filled.get("e3") as expert:
        for name, tensor in expert.tensors.items():
            assert found[name].shape == tensor.shape
            assert found[name].dtype == tensor.dtype


def test_a_forked_child_is_told_and_leaves_the_parent_alone(filled: Store) -> None:
    assert value_of(filled, "e0") == 0
    pid = os.fork()
    if pid == 0:
        try:
            with filled.get("e0"):
                pass
        except ExpertError:
            filled.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert value_of(filled, "e0") == 0
    assert filled.stats().hot_hits == 1


def test_a_warm_expert_is_mapped_once(open_store: OpenStore) -> None:
    """An expert that leaves the hot tier keeps its page tables, until its image leaves."""
    store = open_store(hot_bytes="1200K")
    for number in range(3):
        store.add(f"e{number}", state(float(number)))
    places = set()
    for number in (0, 1, 0, 1, 0):
        with store.get(f"e{number}") as expert:
            places.add(expert.tensors["w"].data_ptr())
        assert expert.tensors == {}
    assert len(places) == 2
    assert value_of(store, "e2") == 2  # e1 leaves, and is mapped anew
    assert [value_of(store, f"e{number}") for number in (1, 0, 2)] == [1, 0, 2]
    assert store.stats().loads == 6


def test_an_image_leaves_though_another_process_has_an_idle_mapping(
    open_store: OpenStore,
) -> None:
    store, other = open_store(hot_bytes="1200K"), open_store()
    for number in range(4):
        store.add(f"e{number}", state(float(number)))
    other.refresh()
    assert [value_of(store, name) for name in ("e0", "e1")] == [0, 1]
    assert [value_of(other, name) for name in ("e0", "e2")] == [0, 2]
    assert store.states()["e0"] is Place.WARM
    other.close()
    with open_store() as third:
        assert [value_of(third, name) for name in ("e3", "e1", "e0")] == [3, 1, 0]
    assert [value_of(store, f"e{number}") for number in (0, 1, 2, 3, 0)] == [0, 1, 2, 3, 0]
