"""Routes reach every pair without credit loops, load links evenly, and change little on failures."""

import json
from random import Random

import numpy as np
import pytest
from tests.draws import cases, drawn, seeds

from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric.net import HDR_BYTES_S, Builder, Net
from fireflyer.fabric.routing import NO_PORT, Routes, route
from fireflyer.fabric.topologies import Subtree, fat_tree2, fat_tree3, preset, two_zone
from fireflyer.fabric.verify import Check, cycles, reaching, shift_load, zone_orders


def sound(net: Net, routes: Routes) -> Check:
    check = Check(net, routes.tables, routes.lanes)
    assert check.unreachable_though_connected == 0
    assert check.credit_loops == []
    return check


def test_the_preset_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["net", "verify", "--preset", "fire-flyer2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"] == 1560 * 1559
    assert (found["unreachable"], found["credit_loops"], found["max_link_load"]) == (0, 0, 1)
    assert (found["cross_link_spread"], found["lanes"]) == (1.0, 2)
    assert found["gateway_link_spread"] < 1.03
    assert found["wall_s"] > 0
    assert run_line(["net", "verify"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_fat_tree_has_the_routes_per_link_of_opensm_and_no_shift_loads_a_link_twice() -> None:
    net = fat_tree2(800)
    check = sound(net, route(net))
    assert set(check.routes_per_port[net.peers >= 0].tolist()) == {39}
    assert shift_load(check) == (1, 799)


def test_a_subtree_shares_its_links_evenly_and_leaves_the_others_theirs() -> None:
    [net] = preset("mixed-speeds")
    check = sound(net, route(net))
    assert not route(net).fallback
    assert shift_load(check) == (4, 863)  # 32 hosts of a leaf behind 8 links
    full = np.flatnonzero(net.endpoint_rates == HDR_BYTES_S).astype(np.int32)
    assert len(full) == 640
    assert max(check.load(full, np.roll(full, by)) for by in range(1, 640)) == 1


def test_three_layers_carry_every_shift_too() -> None:
    [net] = preset("fat-tree3")
    check = sound(net, route(net))
    assert shift_load(check, most=200) == (1, 200)
    assert check.unreachable == 0


def test_random_permutations_load_links_as_theory_says() -> None:
    """The fullest of 1,600 cables takes 4.9 flows on average (static routes, 30 draws)."""
    net = fat_tree2(800)
    check = Check(net, route(net).tables)
    [order] = zone_orders(net)
    random = np.random.default_rng(1)
    loads = [check.load(order, random.permutation(order)) for _ in range(60)]
    assert 4.4 < np.mean(loads) < 5.5


def test_one_lane_for_both_directions_between_zones_is_a_credit_loop() -> None:
    net = two_zone(1200, 180)
    [loop] = Check(net, route(net).tables).credit_loops
    ring = [one for one, _ in loop.channels]
    for (one, port), following in zip(loop.channels, [*ring[1:], ring[0]], strict=True):
        assert net.peers[one, port] == following


def ring_of(switches: int) -> tuple[Net, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """A ring whose routes all go one way round: reachable, and the classic credit loop."""
    builder = Builder()
    for number in range(switches):
        builder.switch(f"s{number}", 4, 0, 0)
    for number in range(switches):
        builder.link(number, (number + 1) % switches, 1, 2)
        builder.endpoint(f"n{number}/1", number, 3)
    tables = np.full((switches, switches), 1, np.uint8)
    np.fill_diagonal(tables, 3)
    return builder.build(), tables


def test_known_bad_tables_are_found() -> None:
    net, tables = ring_of(5)
    check = Check(net, tables)
    assert (check.unreachable, len(check.credit_loops)) == (0, 1)
    assert len(check.credit_loops[0].channels) == 5
    hole = tables.copy()
    hole[2, 0] = NO_PORT
    check = Check(net, hole)  # packets of s1 and s2 to n0 end at s2
    assert (check.unreachable, check.unreachable_though_connected) == (2, 2)
    wrong = tables.copy()
    wrong[2, 0] = 3
    assert Check(net, wrong).unreachable == 2
    bouncing = tables.copy()
    bouncing[3, 1] = 2  # s2 sends forwards and s3 back
    check = Check(net, bouncing)
    assert check.unreachable == 2
    assert len(check.credit_loops) == 1


def test_own_routes_of_a_ring_fall_back_to_one_root() -> None:
    net, _ = ring_of(6)
    routes = route(net)
    assert routes.fallback
    assert sound(net, routes).unreachable == 0


def broken(net: Net, random: Random, most: int) -> Net:
    """The network without up to `most` random switches and cables."""
    rows, columns = np.nonzero(net.peers >= 0)
    count = random.randint(1, most)
    switches = random.sample(range(len(net.switches)), random.randint(0, count))
    links = [int(one) for one in random.sample(range(len(rows)), count - len(switches))]
    return net.without(switches, [(int(rows[one]), int(columns[one])) for one in links])


SMALL = {
    "two zones": lambda: two_zone(24, 2, 8, 4),
    "two layers": lambda: fat_tree2(30, 8),
    "a subtree": lambda: fat_tree2(16, 8, subtree=Subtree(14, 2, 1e9)),
    "three layers": lambda: fat_tree3(50, 6),
    "three full layers": lambda: fat_tree3(54, 6, 9),
}


@pytest.mark.parametrize("name", SMALL)
def test_failures(name: str) -> None:
    """Every connected pair stays reachable, no loop forms, and intact routes stay as they are."""
    net = SMALL[name]()
    before = route(net)
    assert sound(net, before).unreachable == 0
    assert not before.fallback
    structured = 0
    for seed in seeds(f"fabric failures {name}", 250):
        after = broken(net, Random(seed), 5)
        routes = route(after, before)
        sound(after, routes)
        if routes.fallback:
            continue
        structured += 1
        intact = reaching(after, before.tables)
        assert np.array_equal(routes.tables[intact], before.tables[intact]), seed
    assert structured


def test_failures_of_the_paper_network() -> None:
    net = two_zone(1200, 180)
    before = route(net)
    for seed in seeds("fabric failures fire-flyer2", 80):
        after = broken(net, Random(seed), 5)
        routes = route(after, before)
        assert not routes.fallback
        sound(after, routes)
        intact = reaching(after, before.tables)
        assert np.array_equal(routes.tables[intact], before.tables[intact]), seed


def test_one_dead_cable_changes_few_entries() -> None:
    """Only entries whose route used the cable change."""
    net = fat_tree2(800)
    before = route(net)
    after = net.without(links=[(0, 21)])
    routes = route(after, before)
    changed = routes.tables != before.tables
    spine = int(net.peers[0, 21])
    down = before.tables[spine] == net.peer_ports[0, 21]
    # Leaf 0 climbs elsewhere to 39 endpoints, the other 39 leaves do to one, and the spine cannot
    # descend to the 20 endpoints of the leaf any more.
    assert (int(changed[0].sum()), int(down.sum())) == (39, 20)
    assert int(changed.sum()) == 39 + 39 + 20
    assert sound(after, routes).unreachable == 0


def any_net(random: Random) -> Net:
    """A connected or disconnected random graph with endpoints at random switches."""
    builder, count = Builder(), random.randint(2, 14)
    for number in range(count):
        builder.switch(f"s{number}", 16, random.randint(0, 2), 0)
    for _ in range(random.randint(count - 1, 3 * count)):
        one, other = random.sample(range(count), 2)
        if builder.free(one) and builder.free(other):
            builder.link(one, other)
    for number in range(random.randint(2, 12)):
        at = random.randrange(count)
        if builder.free(at):
            builder.endpoint(f"n{number}/1", at)
    return builder.build()


def test_random_networks() -> None:
    random = drawn("fabric random networks")
    for _ in range(cases(500)):
        net = any_net(random)
        sound(net, route(net))


def walked(net: Net, tables: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    """Unreachable pairs, counted packet by packet."""
    at, _ = net.attached
    missed = 0
    for source in range(len(net.endpoints)):
        for end in range(len(net.endpoints)):
            if source == end:
                continue
            here = int(at[source])
            for _ in range(len(net.switches) + 1):
                port = int(tables[here, end]) if here >= 0 else NO_PORT
                if here < 0 or port >= net.peers.shape[1] or net.hosts[here, port] == end:
                    break
                here = int(net.peers[here, port])
            else:
                here = -1
            arrived = here >= 0 and port < net.peers.shape[1] and net.hosts[here, port] == end
            missed += not arrived
    return missed


def test_the_verifier_agrees_with_a_walk_of_every_packet() -> None:
    random = drawn("fabric damaged tables")
    for _ in range(cases(200)):
        net = any_net(random)
        tables = route(net).tables.copy()
        for _ in range(random.randint(0, 4)):
            tables[random.randrange(tables.shape[0]), random.randrange(tables.shape[1])] = (
                random.choice([1, 2, 3, 40, NO_PORT])
            )
        check = Check(net, tables)
        assert check.unreachable == walked(net, tables)


def test_cycles_of_a_graph() -> None:
    first = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    second = np.array([1, 2, 0, 4, 3, 6, 7, 7])
    assert sorted(sorted(cycle) for cycle in cycles(first, second, 8)) == [[0, 1, 2], [3, 4], [7]]
    assert cycles(np.array([0, 1]), np.array([1, 2]), 3) == []


def test_tables_of_another_network_are_refused() -> None:
    with pytest.raises(FabricError, match="previous tables have shape"):
        route(fat_tree2(8, 4), route(fat_tree2(30, 8)))
