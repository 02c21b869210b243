"""When a cluster that was shot at is at rest."""

from tests.fs3.soak.cluster import sole_servers, unsettled

from fireflyer.fs3.survey import ChainState, Health, NodeState


def told(heard_s: float | None, chain: str = "whole") -> Health:
    """A manager's word on two nodes, of which one was heard just now."""
    nodes = [
        NodeState(n, f"n{n}", f"host-{n}:1", alive=True, targets=2, free_targets=0, heard_s=at)
        for n, at in ((1, 0.05), (2, heard_s))
    ]
    return Health("host-0:1", 1, 7, "", "", nodes, [ChainState(1, 5, chain, [])], 1)


def test_a_cluster_is_at_rest_when_each_node_was_heard_since() -> None:
    assert unsettled(told(0.1), 1.0) == []
    assert unsettled(told(0.5), 1.0) == []


def test_a_node_that_was_killed_a_moment_ago_is_not_missed_yet() -> None:
    """Its chains are whole by the manager's word, for its lease runs."""
    assert unsettled(told(0.5), 0.2) == ["n2 was not heard"]
    assert unsettled(told(None), 0.2) == ["n2 was not heard"]


def test_a_chain_that_is_not_whole_is_named() -> None:
    assert unsettled(told(0.1, "degraded"), 1.0) == ["chain 1 version 5 is degraded: []"]


def test_who_served_alone_is_read_from_the_log() -> None:
    log = """
2026-11-25 19:40:52,351 I fireflyer.fs3 manager: chain 1 version 9: 256 SERVING, 1024 OFFLINE
2026-11-25 19:40:53,655 I fireflyer.fs3 manager: chain 1 version 10: 256 SERVING, 1024 SYNCING
2026-11-25 19:40:53,736 I fireflyer.fs3 manager: chain 1 version 11: 256 SERVING, 1024 SERVING
2026-11-25 19:40:54,100 I fireflyer.fs3 manager: chain 1 version 12: 256 LASTSRV, 1024 LASTSRV
"""
    assert sole_servers(log, {1: 8}, {1: 12}) == {256}
    assert sole_servers(log, {1: 10}, {1: 12}) == set()
    assert sole_servers(log, {1: 5}, {1: 8}) == set()
