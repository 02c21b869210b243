"""Limits of memory and cores: what is read and written, and real cgroups where they may be made."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fireflyer.hai.model.engine import NodeObserved
from fireflyer.hai.model.observations import OutOfMemory
from fireflyer.hai.supervisor.cgroups import (
    Base,
    Cgroup,
    Limits,
    find_base,
    note_path,
    parse_mounts,
    parse_own,
    remove,
    settings,
    write_note,
)

Stage = Any

OWN = """\
9:name=systemd:/
4:memory:/box/a
3:cpu,cpuacct:/
0::/user.slice/s.scope
"""
MOUNTS = """\
30 24 0:26 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory
31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
24 1 0:22 / / rw - ext4 /dev/vda rw
"""
UNIFIED = "29 23 0:26 /docker/x /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


# -- pure ------------------------------------------------------------------------------------------


def test_own_cgroups_and_mounts_are_parsed() -> None:
    own = parse_own(OWN)
    assert (own["memory"], own["cpu"], own[""]) == ("/box/a", "/", "/user.slice/s.scope")
    mounts = parse_mounts(MOUNTS)
    assert mounts["memory"] == ("/sys/fs/cgroup/memory", "/")
    assert mounts["cpu"] == mounts["cpuacct"] == ("/sys/fs/cgroup/cpu", "/")
    assert parse_mounts(UNIFIED) == {"": ("/sys/fs/cgroup", "/docker/x")}


@pytest.mark.parametrize(
    ("controller", "files", "wanted"),
    [
        ("memory", {"memory.max", "memory.swap.max"}, ["memory.max=67108864", "memory.swap.max=0"]),
        ("memory", {"memory.limit_in_bytes"}, ["memory.limit_in_bytes=67108864"]),
        (
            "memory", {"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"},
            ["memory.limit_in_bytes=67108864", "memory.memsw.limit_in_bytes=67108864"],
        ),
        ("cpu", {"cpu.max"}, ["cpu.max=300000 100000"]),
        ("cpu", {"cpu.cfs_quota_us"}, ["cpu.cfs_period_us=100000", "cpu.cfs_quota_us=300000"]),
    ],
)  # fmt: skip
def test_what_is_written_into_a_cgroup(controller: Any, files: set[str], wanted: list[str]) -> None:
    found = settings(controller, Limits(memory_mib=64, cpus=3), files)
    assert [f"{name}={text}" for name, text in found] == wanted
    assert settings(controller, Limits(), files) == []


def system(root: Path, mounts: str, own: str, folders: dict[str, dict[str, str]]) -> None:
    """A file system with these files of proc(5) and these cgroups."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(mounts)
    (proc / "cgroup").write_text(own)
    for folder, files in folders.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / folder / name).write_text(text)


def test_version_1_is_used_below_the_own_cgroup(tmp_path: Path) -> None:
    system(tmp_path, MOUNTS, OWN, {"sys/fs/cgroup/memory/box/a": {}, "sys/fs/cgroup/cpu": {}})
    base = find_base(str(tmp_path))
    assert base.below("x") == {
        "memory": f"{tmp_path}/sys/fs/cgroup/memory/box/a/x",
        "cpu": f"{tmp_path}/sys/fs/cgroup/cpu/x",
    }
    assert base.unheld() == ""


def test_a_cgroup_with_the_server_alone_is_taken_and_one_with_others_is_not(tmp_path: Path) -> None:
    mine, text = "sys/fs/cgroup/mine", "0::/docker/x/mine\n"
    files = {
        "cgroup.controllers": "cpu memory pids", "cgroup.subtree_control": "cpu memory",
        "cgroup.procs": f"{os.getpid()}\n",
    }  # fmt: skip
    system(tmp_path, UNIFIED, text, {mine: files})
    assert find_base(str(tmp_path)).below("x") == dict.fromkeys(
        ("memory", "cpu"), f"{tmp_path}/{mine}/x"
    )
    (tmp_path / mine / "cgroup.subtree_control").write_text("")
    (tmp_path / mine / "cgroup.controllers").write_text("memory")
    base = find_base(str(tmp_path))
    assert [*base.folders] == ["memory"]
    assert (
        base.unheld()
        == f"limits of cores are not enforced: {tmp_path}/{mine} has no controller cpu"
    )


def test_a_machine_without_cgroups_holds_nothing_and_says_so(tmp_path: Path) -> None:
    system(tmp_path, "", "", {})
    base = find_base(str(tmp_path))
    assert base.folders == {}
    assert base.unheld() == "limits of memory and cores are not enforced: no cgroups are mounted"
    assert "/proc cannot be read" in find_base(str(tmp_path / "none")).unheld()


def test_only_cgroups_of_the_platform_are_removed(tmp_path: Path) -> None:
    other, own, gone = tmp_path / "other", tmp_path / "fireflyer-x", tmp_path / "fireflyer-y"
    other.mkdir()
    own.mkdir()
    note = tmp_path / "n0.cgroups"
    write_note(note, map(str, (other, own, gone)))
    remove(note)
    assert (other.exists(), own.exists(), note.exists()) == (True, False, False)
    remove(note)


# -- real ------------------------------------------------------------------------------------------


@pytest.fixture
def base(stage: Stage) -> Base:
    """Where the engines of the stage make cgroups."""
    found = stage.base = find_base()
    if found.missing:
        pytest.skip(found.unheld())
    return found


GROWS = """
    held = []
    while len(held) < 400:
        held.append(b"x" * (1 << 20))
    report("too much")
"""
ENTERED = """
    own = open("/proc/self/cgroup").read()
    report("entered", own.count("fireflyer-"))
    await_gate()
"""


def left(stage: Stage, node: str = "n0", attempt: int = 1) -> list[str]:
    """Cgroups that are noted, or that the note of a running attempt named."""
    note = note_path(stage.folder / stage.task / str(attempt), node)
    return note.read_text().splitlines() if note.exists() else []


def test_a_limit_of_memory_is_held_and_told(stage: Stage, base: Base) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(GROWS, nodes=1, start="exec", memory_mib=64))
        events, end = await s.ended(engine)
        (pid,) = s.pids(events).values()
        told = "out of memory: limit 64MiB of the task, the kernel killed rank 0"
        assert end.outcome == "failed"
        assert end.reason == f"{told}; rank 0 on n0 was killed by SIGKILL (pid {pid})"
        (seen,) = [e.observation for e in events if isinstance(e, NodeObserved)]
        assert isinstance(seen, OutOfMemory)
        assert (seen.rank, seen.pid, seen.limited, seen.limit_mib) == (0, pid, True, 64)
        assert s.exits(events) == {0: (None, signal.SIGKILL)}
        assert not left(s)

    stage.play(scene)


@pytest.mark.full
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_ranks_of_a_node_share_limits_and_the_child_of_one_may_reach_them(
    stage: Stage, base: Base, start: Any
) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            own = open("/proc/self/cgroup").read()
            report("entered", own.count("fireflyer-"))
            await_gate()
            if RANK == 1:
                code = subprocess.run([sys.executable, "-c", "x = b'x' * (400 << 20)"]).returncode
                report("child", code)
                sys.exit(3)
            forever()
        """
        await engine.launch(s.gang(script, nodes=1, ranks=2, start=start, memory_mib=200, cpus=1))
        assert sorted(await s.reports(2)) == [["0", "entered", "2"], ["1", "entered", "2"]]
        folders = left(s)
        assert len(folders) == len({*base.folders.values()})
        assert all(len(Path(f, "cgroup.procs").read_text().split()) == 2 for f in folders)
        s.open_gate(2)
        assert await s.reports(1) == [["1", "child", "-9"]]
        _, end = await s.ended(engine)
        assert end.reason.startswith(
            "out of memory: limit 200MiB of the task, the kernel killed a process of the task; rank 1"
        )
        assert not left(s)
        assert not any(map(os.path.exists, folders))

    stage.play(scene)


@pytest.mark.full
def test_cores_are_limited(stage: Stage, base: Base) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(ENTERED, nodes=1, start="exec", cpus=3))
        assert await s.reports(1) == [["0", "entered", "1"]]
        (folder,) = left(s)
        files = {name: Path(folder, name) for name in ("cpu.max", "cpu.cfs_quota_us")}
        (text,) = [path.read_text() for path in files.values() if path.exists()]
        assert text.split()[0] == "300000"
        s.open_gate(1)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"
        assert not os.path.exists(folder)

    stage.play(scene)


@pytest.mark.full
@pytest.mark.parametrize("doomed", ["supervisor", "guard", "both"])
@pytest.mark.parametrize("away", [False, True], ids=["server", "no server"])
def test_no_cgroup_is_left_by_a_kill(stage: Stage, base: Base, doomed: str, *, away: bool) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang(ENTERED, nodes=1, start="exec", memory_mib=500, cpus=1)
        await engine.launch(gang)
        await s.reports(1)
        folders = left(s)
        assert len(folders) == len({*base.folders.values()})
        guard, supervisor = s.guard("n0"), s.supervisor("n0")
        if away:
            await s.close(engine)
        if doomed != "guard":
            os.kill(supervisor, signal.SIGSTOP if doomed == "both" else signal.SIGKILL)
        if doomed != "supervisor":
            os.kill(guard, signal.SIGKILL)
        if doomed == "both":
            os.kill(supervisor, signal.SIGKILL)
        await s.gone(guard)
        await s.gone(supervisor)
        if away:
            engine = s.engine()
            await engine.recover(gang)
        _, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert not left(s)
        assert not any(map(os.path.exists, folders))

    stage.play(scene)


@pytest.mark.full
def test_no_cgroup_is_left_when_a_task_ends_without_a_server(stage: Stage, base: Base) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang(ENTERED, nodes=1, start="exec", memory_mib=500, cpus=1)
        await engine.launch(gang)
        await s.reports(1)
        folders = left(s)
        (rank,) = (int(pid) for pid in Path(folders[0], "cgroup.procs").read_text().split())
        await s.close(engine)
        s.open_gate(1)
        await s.gone(rank)
        engine = s.engine()
        await engine.recover(gang)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"
        assert not left(s)
        assert not any(map(os.path.exists, folders))

    stage.play(scene)


def test_a_cgroup_that_cannot_be_made_fails_the_attempt(stage: Stage, tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        nowhere = tmp_path / "file"
        nowhere.write_text("")
        s.base = Base({"memory": str(nowhere)})
        engine = s.engine()
        await engine.launch(s.gang("", nodes=1, start="exec", memory_mib=64))
        _, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert "n0 cannot prepare the attempt" in end.reason

    stage.play(scene)


def test_kills_are_counted_once(tmp_path: Path) -> None:
    folder = tmp_path / "fireflyer-x"
    folder.mkdir()
    (folder / "memory.max").write_text("")
    events = folder / "memory.events"
    events.write_text("low 0\noom 0\noom_kill 2\n")
    group = Cgroup(Limits(64, 0, {"memory": str(folder)}), tmp_path / "note")
    assert group.killed() == 0
    events.write_text("low 0\noom 1\noom_kill 3\n")
    assert (group.killed(), group.killed()) == (1, 0)
    assert (folder / "memory.max").read_text() == str(64 << 20)
    assert group.entrances == (f"{folder}/cgroup.procs",)
