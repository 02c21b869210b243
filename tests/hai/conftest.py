"""One Slurm cluster for all tests that want one; it is started by the first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hai.slurm.cluster import TOPOLOGY, Cluster, missing


@pytest.fixture(scope="session")
def cluster_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def cluster(cluster_of_session: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, which SLURM_CONF names for this test."""
    monkeypatch.setenv("SLURM_CONF", str(cluster_of_session.conf))
    return cluster_of_session


@pytest.fixture
def own_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """A cluster that the test may break; its parameter, if any, is its topology.conf."""
    if why := missing():
        pytest.skip(why)
    folder = tmp_path / "slurm"
    folder.mkdir()
    found = Cluster(folder, getattr(request, "param", TOPOLOGY))
    monkeypatch.setenv("SLURM_CONF", str(found.conf))
    found.start()
    yield found
    found.stop()
