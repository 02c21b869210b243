"""What is left of a file system whose chains, metadata or nodes are missing or not its own."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError, Unavailable
from fireflyer.fs3.client import Client, Settings, connect
from fireflyer.fs3.client.discovery import announce
from fireflyer.fs3.config import ClusterConfig, embed
from fireflyer.fs3.layout import chains_of
from fireflyer.fs3.process import ALL, Process
from fireflyer.fs3.storage.node import NodeSettings, StorageNode

SHORT = Settings(deadline_s=1.0, attempt_s=0.5)


@contextmanager
def served(config: ClusterConfig) -> Iterator[Process]:
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        yield process


def client(process: Process, config: ClusterConfig, settings: Settings | None = None) -> Client:
    return connect(process.manager, secret_file=config.secret_file, settings=settings)


def first_chain(fs: Client, path: str) -> int:
    """Of a file, where the table has two chains."""
    layout = fs.inode(path).layout
    assert layout
    return int(chains_of(layout, (1, 2), np.arange(1))[0])  # type: ignore[arg-type]


def test_a_stopped_chain_leaves_the_names_and_the_other_chains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fs"
    config = embed(folder, 1, 2)
    with served(config) as process, client(process, config) as fs:
        names: dict[int, str] = {}
        while len(names) < 2:
            path = f"/f{len(fs.listdir('/'))}"
            with fs.open(path, "wb") as file:
                file.write(path.encode())
            names[first_chain(fs, path)] = path
        [node] = process.nodes.values()
        gone, its = next(iter(node.targets().items()))
        chain = int(its["chain"])
    (folder / "s1" / f"target-{gone % 256:03d}").rename(tmp_path / "aside")
    with served(config) as process:
        announce(folder, process.manager)
        with client(process, config, SHORT) as fs:
            assert set(names.values()) <= {f"/{name}" for name in fs.listdir("/")}
            [healthy] = names.keys() - {chain}
            with client(process, config) as patient:
                assert patient.open(names[healthy]).read() == names[healthy].encode()
            with pytest.raises(Unavailable, match=f"chain {chain} is stopped"):
                fs.open(names[chain]).read()
        capsys.readouterr()
        assert run_line(["fs", "status", "--dir", str(folder)]) == 0
        assert f"chain {chain} stopped" in capsys.readouterr().out


def test_lost_metadata_is_not_replaced_by_empty_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "fs"
    config = embed(folder, 1, 2)
    with served(config) as process, client(process, config) as fs, fs.open("/a", "wb") as file:
        file.write(b"what is there")
    for path in folder.glob("meta.sqlite*"):
        path.rename(tmp_path / path.name)
    with pytest.raises(
        ConfigError, match=r"meta\.sqlite is missing: it has the names of the files"
    ):
        embed(folder, None, None)
    for path in tmp_path.glob("meta.sqlite*"):
        path.rename(folder / path.name)
    config = embed(folder, None, None)
    with served(config) as process, client(process, config) as fs:
        assert fs.open("/a").read() == b"what is there"


def test_a_node_of_another_file_system_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = embed(tmp_path / "mine", 1, 1), embed(tmp_path / "other", 1, 1)
    for config in (mine, other):
        with served(config):
            pass
    for path in (tmp_path / "mine").glob("meta.sqlite*"):
        path.unlink()
    for path in (tmp_path / "other").glob("meta.sqlite*"):
        shutil.copy(path, tmp_path / "mine")
    refusal = "the folder of node s1 belongs to file system [0-9a-f]{8}, and this manager serves"
    with pytest.raises(ConfigError, match=refusal):
        Process(mine, ALL, mine.nodes)
    assert re.search(f"refused a process: {refusal}", caplog.text)
    (tmp_path / "mine" / "s1" / "identity").write_text("{")
    with pytest.raises(ConfigError, match="identity is damaged"):
        Process(mine, ALL, mine.nodes)


def test_targets_without_a_number_are_taken_by_a_manager_that_knows_their_node(
    tmp_path: Path,
) -> None:
    config = embed(tmp_path / "fs", 1, 1)
    with served(config):
        pass
    (tmp_path / "fs" / "s1" / "identity").unlink()
    with served(config):
        pass
    (tmp_path / "fs" / "s1" / "identity").unlink()
    node = config.nodes["s1"]
    renamed = msgspec.structs.replace(config, nodes={"s2": node})
    with pytest.raises(ConfigError, match="node s2 belongs to a file system without a number"):
        Process(renamed, ALL, renamed.nodes)


def test_a_name_is_not_used_twice_at_a_time(tmp_path: Path) -> None:
    config = msgspec.structs.replace(embed(tmp_path / "fs", 1, 1), failover_s=0.8)
    empty = NodeSettings(directory=tmp_path / "empty", name="s1")
    empty.directory.mkdir()
    with served(config) as process, client(process, config) as fs:
        with fs.open("/a", "wb") as file:
            file.write(b"safe")
        with pytest.raises(ConfigError, match="node s1 is already running with another folder"):
            StorageNode(empty, process.manager, config.secret)
        assert fs.open("/a").read() == b"safe"
        process.nodes["s1"].close()
        StorageNode(empty, process.manager, config.secret).close()  # its disk was replaced


def test_the_names_of_a_client_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, fireflyer.fs3; assert 'fireflyer.fs3.client' not in sys.modules, 'too early'\n"
        "from fireflyer.fs3 import Client, File, Settings, attach, connect\n"
        "assert not hasattr(fireflyer.fs3, 'absent')\n"
        "import fireflyer.fs3.client as home; assert home.connect is connect"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
