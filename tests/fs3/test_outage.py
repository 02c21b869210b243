"""What is left of a file system whose chains, metadata or nodes are missing or not its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import Unavailable
from fireflyer.fs3.client import Client, Settings, connect
from fireflyer.fs3.config import ClusterConfig, embed
from fireflyer.fs3.find import announce
from fireflyer.fs3.layout import chains_of
from fireflyer.fs3.process import ALL, Process

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
    return int(chains_of(layout, (1, 2), np.arange(1))[0])


def test_a_stopped_chain_leaves_the_names_and_the_other_chains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fs"
    config = embed(folder, 1, 2)
    with served(config) as process, client(process, config) as fs:
        names: dict[int, str] = {}
        while len(names) < 2:
            path = f"/f{len(fs.listdir('/'))}"
            with fs.open(path, "w") as file:
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
