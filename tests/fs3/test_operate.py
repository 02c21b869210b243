"""Operating a file system: metrics, health, logs, settings, growth, and what an operator is told."""

import json
import logging
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import LIMIT_S, until

from fireflyer import log
from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError, DeadlineExceeded, WireError
from fireflyer.fs3 import scrub, survey
from fireflyer.fs3.client import connect
from fireflyer.fs3.client.discovery import Place, announce, attach, find
from fireflyer.fs3.config import FILE, ClusterConfig, NodeConfig, embed, load
from fireflyer.fs3.exporter import CONNECTIONS, HEAD_LIMIT, Exporter, PortTaken
from fireflyer.fs3.process import ALL, Process
from fireflyer.fs3.roles import Role
from fireflyer.fs3.storage.scrub import BEGIN, STEP_CHUNKS, ScrubLog, pause_before
from fireflyer.fs3.survey import Health, NodeState, problems
from fireflyer.rpc.proof import Secret

SECRET = "the secret of an operator's tests"


def get(url: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Name and labels of each value that Prometheus would take."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(text: str, name: str, **labels: str) -> float:
    found = [
        value
        for (its, own), value in samples(text).items()
        if its == name and labels.items() <= dict(own).items()
    ]
    assert found, name
    return sum(found)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Process]]:
    """A file system of two nodes in this process, and its folder."""
    folder = tmp_path_factory.mktemp("operate") / "fs"
    embed(folder, 2, 2)
    file = folder / "cluster.toml"
    node = '[nodes.s{0}]\naddress = "unix:s{0}.sock"\ntargets = 2\n'
    head = file.read_text().partition("[nodes")[0].replace("one_node = true", "")
    file.write_text(head + node.format(1) + node.format(2))
    config = load(file)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(folder, process.manager)
        yield folder, process


def test_every_role_has_metrics(running: tuple[Path, Process]) -> None:
    folder, process = running
    with attach(str(folder)) as fs:
        with fs.open("/a", "wb") as file:
            file.write(bytes(3 << 20))
        with fs.open("/a") as file:
            assert len(file.readall() or b"") == 3 << 20
        with pytest.raises(FileNotFoundError):
            fs.stat("/none")
    _, text = get(process.metrics)
    assert total(text, "fireflyer_fs3_manager_primary") == 1
    assert total(text, "fireflyer_fs3_manager_nodes", state="alive") == 2
    assert total(text, "fireflyer_fs3_manager_chains") == 2
    assert total(text, "fireflyer_fs3_meta_request_seconds_count", kind="Create") >= 1
    assert total(text, "fireflyer_fs3_meta_errors_total", kind="Stat", error="ENOENT") >= 1
    assert (
        1
        <= total(text, "fireflyer_fs3_meta_store_groups_total")
        <= total(text, "fireflyer_fs3_meta_store_commits_total")
    )
    assert total(text, "fireflyer_fs3_storage_read_bytes_total") >= 3 << 20
    assert total(text, "fireflyer_fs3_storage_written_bytes_total") >= 3 << 20
    for what in ("read", "write", "sync"):
        name = f"fireflyer_fs3_storage_{what}_seconds"
        count = total(text, f"{name}_count")
        assert count > 0
        assert total(text, f"{name}_bucket", le="+Inf") == count
        assert 0 < total(text, f"{name}_sum") < 600
    assert total(text, "fireflyer_fs3_storage_target_chunks", node="s1") >= 3
    assert total(text, "fireflyer_fs3_storage_target_applied_total") >= 6
    assert total(text, "fireflyer_fs3_storage_targets", node="s2") == 2
    assert 0 < total(text, "fireflyer_fs3_storage_lease_seconds", node="s1") <= 3
    assert total(text, "process_resident_memory_bytes") > 0
    secret = (folder / "secret").read_text().strip()
    assert secret not in text
    health = json.loads(get(process.metrics.replace("metrics", "healthz"))[1])
    assert (health["status"], health["wrong"]) == ("ok", {})
    assert health["roles"] == ["manager", "meta", "storage s1", "storage s2"]


def test_damage_is_counted_and_told(
    running: tuple[Path, Process], caplog: pytest.LogCaptureFixture
) -> None:
    folder, process = running
    caplog.set_level(logging.INFO, "fireflyer")
    with attach(str(folder)) as fs, fs.open("/damaged", "wb") as file:
        file.write(os.urandom(1 << 20))
    node = process.nodes["s2"]
    target, its = next((t, its) for t, its in node.targets().items() if its["bytes"])
    for path in sorted((folder / "s2" / f"target-{target % 256:03d}").glob("data-*")):
        data = bytearray(path.read_bytes())
        data[: 1 << 20] = bytes(byte ^ 255 for byte in data[: 1 << 20])
        path.write_bytes(data)
    node._service.scrub(target, 0, 0, 1000)
    assert node.targets()[target]["damaged"] > its["damaged"]

    def told() -> bool:
        return any("damaged chunks" in line for line in problems(survey.health(find(str(folder)))))

    until(told)
    chunk = rf"target={target} chain=\d+ inode=\d+ chunk=\d+"
    until(lambda: re.search(f"damage repaired: {chunk}", caplog.text) is not None)
    found = re.findall(f"damage found: ({chunk})", caplog.text)
    assert len(found) == len(set(found)) == node.targets()[target]["damaged"]


def _flip(folder: Path, target: int) -> None:
    """Every byte that a target of the one node stores, behind its back."""
    for path in (folder / "s1" / f"target-{target % 256:03d}").glob("data-*"):
        path.write_bytes(bytes(byte ^ 255 for byte in path.read_bytes()))


def _verdict(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run_line(["fs", *words])
    return code, capsys.readouterr().out


def test_damage_of_one_replica_is_found_and_repaired_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fs"
    config = embed(folder, 2, 2)
    node = msgspec.structs.replace(config.node("s1"), scrub_days=0)
    config = msgspec.structs.replace(config, nodes={"s1": node})
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(folder, process.manager)
        at = ("--dir", str(folder))
        with attach(str(folder)) as fs:
            for number in range(4):
                with fs.open(f"/{number}", "wb") as file:
                    file.write(os.urandom(100_000))
            assert _verdict(capsys, "scrub", "--now", *at)[0] == 0
            [service] = process.nodes.values()
            target = next(t for t, its in service.targets().items() if its["chunks"])
            _flip(folder, target)
            code, out = _verdict(capsys, "check", "--all-replicas", *at)
            assert code == 1
            assert re.search(r"(\d+) damaged chunks found; all repaired$", out, re.M), out
            assert "found" in out
            assert "damaged chunks since it was opened: all are repaired" in out
            assert _verdict(capsys, "scrub", "--now", *at)[0] == 0
            code, out = _verdict(capsys, "check", "--all-replicas", "--json", *at)
            assert code == 0
            assert json.loads(out)["replicas"]["unread"] == []
            _, out = _verdict(capsys, "scrub", "--json", *at)
            assert all(row["scrubbed"] and not row["unrepaired"] for row in json.loads(out))
            monkeypatch.setattr(scrub, "REPAIR_S", 1.0)
            for target in service.targets():
                _flip(folder, target)
            code, out = _verdict(capsys, "scrub", "--now", *at)
            assert code == 1
            assert re.search(r"[1-9]\d* not repaired$", out, re.M), out
            assert (
                "are not repaired, because no other replica" in _verdict(capsys, "status", *at)[1]
            )
            code, out = _verdict(capsys, "check", *at)
            assert code == 1
            assert "every replica on chain" in out


def test_a_read_that_another_replica_had_to_answer_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fs"
    config = embed(folder, 2, 2)
    node = msgspec.structs.replace(config.node("s1"), scrub_days=0)
    config = msgspec.structs.replace(config, nodes={"s1": node})
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(folder, process.manager)
        with attach(str(folder)) as fs, fs.open("/a", "wb") as file:
            file.write(os.urandom(100_000))
        [service] = process.nodes.values()
        for target in [target for target, its in service.targets().items() if its["chunks"]]:
            _flip(folder, target)
            code, out = _verdict(capsys, "check", "--dir", str(folder))
            if code:
                assert "all files can be read; damaged chunks on s1 are being repaired" in out
                return
    raise AssertionError("no replica was read")


def test_a_full_disk_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    disk = os.statvfs(tmp_path)
    reserve = (disk.f_blocks * disk.f_frsize >> 20) + 1
    config = embed(tmp_path / "fs", 1, 1)
    node = msgspec.structs.replace(config.node("s1"), reserve_mib=reserve)
    config = msgspec.structs.replace(config, nodes={"s1": node})
    place = str(tmp_path / "fs")
    (tmp_path / "data").write_bytes(b"x")
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(Path(place), process.manager)
        assert run_line(["fs", "put", "--dir", place, str(tmp_path / "data"), "/name"]) == 1
        said = capsys.readouterr().err
        assert said.startswith("fireflyer: writing /name: a disk of chain 1 (nodes 1) is full")
        assert ".part" not in said
        line = rf"node s1: disk full: refuses writes \([\d,]+ MiB free, {reserve:,} MiB kept for repair\)"

        def told() -> bool:
            return any(re.fullmatch(line, one) for one in problems(survey.health(find(place))))

        until(told)
        assert "disk full: writes are refused: free_mib=" in caplog.text
        _, text = get(process.metrics)
        assert total(text, "fireflyer_fs3_storage_refuses_writes", node="s1") == 1
        assert total(text, "fireflyer_fs3_storage_disk_kept_bytes", node="s1") == reserve << 20


def test_a_disk_with_room_is_not_full(running: tuple[Path, Process]) -> None:
    _, text = get(running[1].metrics)
    assert total(text, "fireflyer_fs3_storage_refuses_writes", node="s1") == 0
    assert total(text, "fireflyer_fs3_storage_disk_kept_bytes", node="s1") == 256 << 20


def test_a_taken_port_of_metrics_is_no_obstacle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a standby, or of another node of this machine with the same cluster.toml."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortTaken, match=f"another process listens at {address}"):
            Exporter(address, Secret())
        config = msgspec.structs.replace(embed(tmp_path / "fs", None, 1), metrics=address)
        with Process(config, ALL, config.nodes) as process:
            assert process.metrics.startswith("http://127.0.0.1:")
            assert address not in process.metrics
            assert get(process.metrics)[0] == 200
            assert f"the metrics of this process are at {process.metrics}" in caplog.text


def test_status_at_one_glance(
    running: tuple[Path, Process], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, process = running
    until(lambda: all(n.version for n in survey.health(find(str(folder))).nodes))
    assert run_line(["fs", "status", "--dir", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "2 chains, 2 whole" in said
    assert process.metrics in said
    assert run_line(["fs", "status", "--dir", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"problems", "software", "table"} <= found.keys()
    assert all(node["disk_bytes"] > 0 for node in found["nodes"])


def test_removed_files_that_are_not_emptied_are_counted(
    running: tuple[Path, Process], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, process = running

    def counted() -> float:
        return total(get(process.metrics)[1], "fireflyer_fs3_meta_unlinked_files")

    def said() -> tuple[str, int]:
        assert run_line(["fs", "status", "--dir", str(folder)]) == 0
        text = capsys.readouterr().out
        assert run_line(["fs", "status", "--dir", str(folder), "--json"]) == 0
        return text, json.loads(capsys.readouterr().out)["unlinked"]

    until(lambda: counted() == 0)
    assert ("removed files" in said()[0], said()[1]) == (False, 0)
    with attach(str(folder)) as fs:
        with fs.open("/gone", "wb") as file:
            file.write(b"x")
            fs.unlink("/gone")
            assert counted() == 1
            text, number = said()
            assert "1 removed files are still open, or being emptied" in text
            assert number == 1
        until(lambda: counted() == 0)


def test_an_ill_role_is_named() -> None:
    exporter = Exporter("127.0.0.1:0", Secret())
    try:
        registry = CollectorRegistry()
        exporter.add("storage n1", registry, lambda: "its lease is over")
        code, body = get(exporter.url.replace("metrics", "healthz"))
        assert (code, json.loads(body)["wrong"]) == (503, {"storage n1": "its lease is over"})
        exporter.remove("storage n1", registry)
        assert get(exporter.url.replace("metrics", "healthz"))[0] == 200
    finally:
        exporter.close()


def test_metrics_beyond_this_machine_need_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metrics_token_file"):
        Exporter("0.0.0.0:0", Secret())
    Exporter("0.0.0.0:0", Secret(), unguarded=True).close()
    token = tmp_path / "token"
    token.write_text("a token of the tests'")
    token.chmod(0o600)
    config = msgspec.structs.replace(
        embed(tmp_path / "fs", None, 1), metrics="0.0.0.0:0", metrics_token_file=str(token)
    )
    with Process(config, ALL, config.nodes) as process:
        url = process.metrics.replace("0.0.0.0", "127.0.0.1")
        assert get(url)[0] == 401
        assert get(url, "another token of tests")[0] == 401
        assert get(url, token.read_text())[0] == 200
        assert token.read_text() not in get(url, token.read_text())[1]


def answers(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except OSError:
        return False


def test_bad_requests_get_an_answer_or_the_end() -> None:
    exporter = Exporter("127.0.0.1:0", Secret())
    host, port = exporter.address.split(":")

    def ask(data: bytes) -> bytes:
        with socket.create_connection((host, int(port)), LIMIT_S) as line:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := line.recv(65536):
                answer += piece
            return answer

    try:
        assert ask(b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        assert ask(b"HEAD /metrics HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
        assert ask(b"GET /other HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")
        assert ask(b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
        assert ask(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert ask(b"GET /metrics HTTP/1.1\r\n") == b""
        assert ask(b"x" * (HEAD_LIMIT - 1)) == b""
        idle = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
        for line in idle:
            line.close()
        until(lambda: answers(exporter.url))  # as soon as one of them has left
    finally:
        exporter.close()


def test_no_metrics_where_none_are_wanted(tmp_path: Path) -> None:
    config = msgspec.structs.replace(embed(tmp_path / "fs", None, 1), metrics="")
    with Process(config, ALL, config.nodes) as process:
        assert process.metrics == ""


def cluster(folder: Path, nodes: int) -> ClusterConfig:
    """One of nodes that come one after the other."""
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    config = embed(folder / "fs", 1, 2)
    names = [f"n{at + 1}" for at in range(nodes)]
    return msgspec.structs.replace(
        config,
        nodes={
            name: NodeConfig(directory=str(folder / name), targets=2, address="127.0.0.1:0")
            for name in names
        },
    )


def test_a_cluster_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = cluster(tmp_path, 1)
    with Process(config, ALL, ["n1"]) as first:
        first.set_up()
        place = str(tmp_path / "fs")
        announce(Path(place), first.manager)
        with attach(place) as fs:
            with fs.open("/old", "wb") as file:
                file.write(b"x" * (5 << 20))
            assert fs.inode("/old").layout.stripe == 2  # type: ignore[union-attr]
            with pytest.raises(
                ConfigError, match=r"no target is free: add .* start that process first"
            ):
                survey.grow(find(place))
            more = cluster(tmp_path, 2)
            more = msgspec.structs.replace(
                more, manager=first.manager, secret_file=config.secret_file
            )
            with Process(more, {Role.STORAGE}, ["n2"]) as second:

                def unused() -> bool:
                    lines = problems(survey.health(find(place)))
                    return any("2 targets of node n2 are in no chain" in line for line in lines)

                until(unused)
                assert run_line(["fs", "grow", "--dir", place]) == 0
                assert "2 chains of 1 targets made" in capsys.readouterr().out
                numbers = iter(range(10_000))

                def wide() -> bool:
                    name = f"/new{next(numbers)}"
                    fs.open(name, "wb").close()
                    layout = fs.inode(name).layout
                    return layout is not None and (layout.stripe, layout.table_version) == (4, 2)

                until(wide)
                with fs.open("/wide", "wb") as file:
                    file.write(b"y" * (8 << 20))
                node = second.nodes["n2"]
                assert sum(its["chunks"] for its in node.targets().values()) > 0
                for name, size in (("/old", 5 << 20), ("/wide", 8 << 20)):
                    with fs.open(name) as file:
                        assert len(file.readall() or b"") == size
                assert survey.check(fs, "/", lambda _: None).damages == []
    with Process(config, ALL, ["n1"]) as again:  # without the new node: old files are served
        again.set_up()
        with connect(again.manager, secret_file=config.secret_file) as fs, fs.open("/old") as file:
            assert len(file.readall() or b"") == 5 << 20


def test_a_dead_manager_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        addresses = [f"127.0.0.1:{line.getsockname()[1]}" for line in (silent, gone)]
        gone.close()
        with pytest.raises(DeadlineExceeded) as raised:
            connect(addresses, timeout=0.3)
    assert all(address in str(raised.value) for address in addresses)
    assert "0.3 s" in str(raised.value)
    assert isinstance(raised.value, WireError)
    monkeypatch.setattr(survey, "TIMEOUT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"no manager answered within 0\.2 s"):
        survey.health(Place([addresses[1]], None))


@pytest.mark.parametrize("style", ["text", "json"])
def test_logs_say_who_speaks(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fireflyer")
    before, level = logger.handlers[:], logger.level
    try:
        log.configure(logging.INFO, style, {"role": "manager,meta", "node": ""})  # type: ignore[arg-type]
        log.speaker("fs3", "storage", "n1").warning("target %d: %s", 7, "a\nb")
        try:
            raise ValueError("a cause")
        except ValueError:
            log.get_logger("rpc").exception("it failed")
        log.get_logger("rpc").debug("not this")
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
    said = capsys.readouterr().err
    if style == "text":
        assert "W fireflyer.fs3 storage n1: target 7: a\nb\n" in said
        assert "E fireflyer.rpc: it failed\nTraceback" in said
        return
    first, second = map(json.loads, said.splitlines())
    assert (first["level"], first["role"], first["node"]) == ("warning", "storage", "n1")
    assert first["message"] == "target 7: a\nb"
    assert (second["logger"], second["role"]) == ("fireflyer.rpc", "manager,meta")
    assert "ValueError: a cause" in second["error"]
    assert second["pid"] == os.getpid()


def test_config_show_says_where_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_FS_SECRET", SECRET)
    monkeypatch.delenv("FIREFLYER_FS", raising=False)
    path = tmp_path / FILE
    path.write_text('failover_s = 0.8\nsecret_file = "secret"\n[nodes.n1]\ntargets = 2\n')
    (tmp_path / "secret").write_text(SECRET)
    assert run_line(["config", "show", "--config", str(path), "--json"]) == 0
    said = capsys.readouterr().out
    assert SECRET not in said
    rows = {(row["section"], row["key"]): row for row in json.loads(said)}
    assert rows["", "failover_s"] | {"value": 0.8, "source": str(path)} == rows["", "failover_s"]
    assert rows["", "replicas"]["source"] == "default"
    assert rows["derived", "lease_s"]["value"] == 0.6
    assert rows["nodes.n1", "targets"]["value"] == 2
    assert rows["nodes.n1", "directory"]["value"] == str(tmp_path / "n1")
    config = load(path)
    fields = set(ClusterConfig.__struct_fields__) - {"nodes"}
    assert {key: rows["", key]["value"] for key in fields} == {
        key: getattr(config, key) for key in fields
    }
    assert run_line(["config", "show", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert SECRET not in text
    assert "[nodes.n1]" in text
    assert run_line(["config", "show", "--config", str(tmp_path / "none")]) == 1
    assert run_line(["config", "show", "--home", str(tmp_path)]) == 0
    path.write_text("replicas = 9\n")
    assert run_line(["config", "show", "--config", str(path)]) == 1
    assert "the number of nodes" in capsys.readouterr().err


def test_the_scrub_goes_on_where_it_was(tmp_path: Path) -> None:
    first = ScrubLog(tmp_path)
    assert first.place(1).after == BEGIN
    first.note(1, (7, 3))
    first.save()
    again = ScrubLog(tmp_path)
    assert (again.place(1).after, again.place(1).finished) == ((7, 3), 0.0)
    again.note(1, BEGIN)
    assert ScrubLog(tmp_path).place(1).finished > 0
    (tmp_path / "scrub.json").write_text("{")
    assert ScrubLog(tmp_path).place(1).after == BEGIN


@pytest.mark.parametrize("chunks", [0, 1, 15, 16, 17, 1000, 10**7])
@pytest.mark.parametrize("scrub_s", [4.0, 7 * 86_400.0])
def test_a_round_of_the_scrub_ends_in_its_time(chunks: int, scrub_s: float) -> None:
    """However few chunks there are."""
    pause = pause_before(scrub_s, chunks, 2)
    steps = -(-(chunks // 2) // STEP_CHUNKS) + -(-(chunks - chunks // 2) // STEP_CHUNKS) + 2
    assert pause * steps <= scrub_s
    assert pause <= 60.0


def test_what_an_operator_is_told() -> None:
    well = NodeState(1, "n1", "a:1", True, 4, 0, 0.1, "1.0", "", 1000, 500)
    found = Health("m:1", 1, 1, "1.0", "", [well], [], 1)
    assert problems(found) == []
    for changes, text in (
        ({"alive": False, "heard_s": 9.0}, "node n1 does not answer: last heartbeat 9.0 s ago"),
        ({"free_bytes": 40}, "node n1 has 4.0% of its disk left"),
        ({"version": "0.9"}, "node n1 runs 0.9, the manager 1.0"),
        ({"faults": {258: "it is locked"}}, "n1/2: it is locked"),
        (
            {"refuses": True, "free_bytes": 12 << 20, "kept_bytes": 256 << 20},
            "node n1: disk full: refuses writes (12 MiB free, 256 MiB kept for repair)",
        ),
    ):
        ill = msgspec.structs.replace(well, **changes)
        assert problems(msgspec.structs.replace(found, nodes=[ill])) == [text]
