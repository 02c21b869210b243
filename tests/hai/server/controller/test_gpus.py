"""Tasks that share a box by GPU: requests, what is shown, and a server that restarts meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError, Corrupted, TaskError
from fireflyer.hai.home import Home, Settings
from fireflyer.hai.http.auth import owner
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.server.process import background_options
from fireflyer.hai.server.settings import inventory, read_settings, remember, settle

MakeSpec = Callable[..., TaskSpec]


def test_tasks_share_a_box_and_keep_their_gpus_over_a_restart(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=2, gpus="8:a100-pcie-40gb,2:v100")
    client = server.client
    for fields in ({"gpus": 2, "gpu_type": "a100"}, {"gpus": 1}, {"gpus": 4}):
        client.wait(client.submit(spec("hold", **fields)).id, {"running"}, LIMIT_S)
    client.submit(spec("hold", gpus=2, gpu_type="v100"))
    text = "waits for 1 node with 2 v100 GPUs; 0 free (at most 1 GPU on one)"
    assert client.why("t4").text == text
    assert [client.task(f"t{n}").devices for n in (1, 2, 3)] == [
        ((0, 1),),
        ((0,),),
        ((4, 5, 6, 7),),
    ]

    def seen() -> list[tuple[str, int, int, str, tuple[str | None, ...]]]:
        return [(n.name, n.gpus, n.free, n.gpu_type, n.devices) for n in client.nodes()]

    client.stop("t2")
    client.wait("t2", {"stopped"}, LIMIT_S)
    client.wait("t4", {"running"}, LIMIT_S)
    first = seen()
    assert first == [
        ("n0", 8, 2, "a100-pcie-40gb", ("t1", "t1", None, None, "t3", "t3", "t3", "t3")),
        ("n1", 2, 0, "v100", ("t4", "t4")),
    ]
    server.kill()
    server.start(nodes=2, gpus="8:a100-pcie-40gb,2:v100")
    assert seen() == first
    client.submit(spec("hold", gpus=3))
    waits = client.why("t5")
    assert (waits.rule, waits.text) == (
        "busy",
        "waits for 1 node with 3 GPUs; 0 free (at most 2 GPUs on one)",
    )
    client.wait(client.submit(spec("hold", gpus=2)).id, {"running"}, LIMIT_S)
    assert client.task("t6").devices == ((2, 3),)
    launch = next(e for e in client.events("t6") if e.kind == "starting")
    assert launch.detail == {"nodes": ["n0"], "devices": [[2, 3]]}
    assert client.why("t6").rule == ""
    about = client.events("t1")[0].detail  # what a replay of the history needs
    assert about == {"user": owner(), "gpus": 2, "gpu_type": "a100"}


def test_requests_that_no_node_serves_are_refused(server: Any, spec: MakeSpec) -> None:
    server.start(nodes=1, gpus="4:a100-pcie-40gb")
    with pytest.raises(TaskError, match=r"1 node with 1 h100 GPU each; .*Its GPUs: a100-pcie-40gb"):
        server.client.submit(spec("hold", gpus=1, gpu_type="h100"))
    with pytest.raises(
        TaskError, match="1 node with 8 a100 GPUs each; this server has 0 such nodes"
    ):
        server.client.submit(spec("hold", gpus=8, gpu_type="a100"))
    for fields in ({"gpu_type": "a100"}, {"gpus": 1, "gpu_type": "A100"}):
        with pytest.raises(ConfigError, match="invalid gpu_type"):
            server.client.submit(spec("hold", **fields))


# -- what a home remembers -------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    found.create()
    return found


def test_later_servers_use_the_options_of_the_last_up(home: Home) -> None:
    assert read_settings(home) == Settings()
    remember(home, settle(home, Settings(gpus="4:a100,4:v100", port=7070)))
    remember(home, settle(home, Settings(nodes=4, log_limit_mib=128)))
    known = settle(home, Settings())
    assert known == Settings(nodes=4, gpus="4:a100,4:v100", port=7070, log_limit_mib=128)
    devices, nodes = inventory(known)
    assert (len(devices), nodes) == (8, 4)
    options = background_options(home, 9)
    assert (options.nodes, options.port, options.log_limit) == (4, 7070, 128 << 20)
    assert options.devices == devices
    assert settle(home, Settings(port=0)).port == 0


def test_a_client_names_the_nodes_where_up_named_none(home: Home) -> None:
    remember(home, Settings(gpus="2:a100"))
    assert background_options(home, 3).nodes == 3
    assert background_options(home, None).nodes == 1
    remember(home, Settings(gpus="0"))
    assert background_options(home, None).nodes == 2


def test_options_that_cannot_be_used_are_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="invalid --gpus 'a100:8'"):
        settle(home, Settings(gpus="a100:8"))
    with pytest.raises(ConfigError, match="--nodes 2 or more"):
        inventory(Settings(gpus="1:a100,1:v100", nodes=1))
    home.settings.write_text("{")
    with pytest.raises(Corrupted, match=r"settings\.json"):
        settle(home, Settings())
