"""Dumps of InfiniBand's tools: round trips, recorded output of the real tools, damaged files.

`data/` holds what opensm 3.3.23 and ibnetdiscover wrote about ibsim 0.10 running
`two_zone(8, 1, 4, 2)`: tables of two of its engines, and ours loaded with `-R file -U`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric.infiniband import Site, read_net, read_tables, site, write_net, write_tables
from fireflyer.fabric.net import HDR_BYTES_S, Net
from fireflyer.fabric.routing import Table, route
from fireflyer.fabric.topologies import Subtree, fat_tree2, fat_tree3, preset, two_zone
from fireflyer.fabric.verify import Check

DATA = Path(__file__).parent / "data"
SMALL = two_zone(8, 1, 4, 2)
NET = write_net(site(SMALL))
TABLES = write_tables(site(SMALL), route(SMALL).tables)


def same(net: Net, tables: Table, whole: Site, read: Table) -> int:
    """Checks that the cables agree, name by name, and returns the entries that differ."""
    rows = [whole.net.switches.index(name) for name in net.switches]
    places = {name: number for number, name in enumerate(whole.net.endpoints)}
    columns = [places[name] for name in net.endpoints]
    back = np.full(len(rows) + 1, -1)
    back[rows] = np.arange(len(rows))
    assert np.array_equal(back[whole.net.peers[rows]], net.peers)
    assert np.array_equal(whole.net.peer_ports[rows], net.peer_ports)
    assert np.array_equal(whole.net.levels[rows][net.levels == 0], net.levels[net.levels == 0])
    return int(np.count_nonzero(read[rows][:, columns] != tables))


@pytest.mark.parametrize("net", [SMALL, fat_tree3(50, 6), preset("fire-flyer2")[0]])
def test_round_trip(net: Net) -> None:
    tables = route(net).tables
    whole = read_net(write_net(site(net)), "net")
    assert same(net, tables, whole, read_tables(write_tables(site(net), tables), whole, "lft")) == 0
    assert np.array_equal(np.sort(whole.net.rates, None), np.sort(net.rates, None))


def test_speeds_of_cables_are_read() -> None:
    text = write_net(site(fat_tree2(4, 4, subtree=Subtree(3, 1, HDR_BYTES_S / 2))))
    assert text.count("4xEDR") == 2 * (3 + 1)
    assert read_net(text.replace("4xHDR", "2xNDR"), "net").net.rates.max() == HDR_BYTES_S
    assert read_net(text.replace("4xHDR", "1xXDR"), "net").net.rates.max() == HDR_BYTES_S
    assert read_net(text.replace("4xHDR", "1xSDR"), "net").net.rates.max() == HDR_BYTES_S / 2
    assert read_net(text.replace(" 4xHDR", ""), "net").net.rates.max() == HDR_BYTES_S
    for wrong in ("4xFOO", "0xHDR", "99999999999999999999xHDR"):
        with pytest.raises(FabricError, match=r"net, line \d+: invalid speed"):
            read_net(text.replace("4xHDR", wrong), "net")
    with pytest.raises(FabricError, match=r"net, line \d+: invalid lid 9999"):
        read_net(text.replace(" lid 2 ", " lid 99999999999999999999 "), "net")


def test_a_round_trip_through_the_real_opensm() -> None:
    whole = read_net((DATA / "real.net").read_text(), "real.net")
    read = read_tables((DATA / "own.lft").read_text(), whole, "own.lft")
    assert same(SMALL, route(SMALL).tables, whole, read) == 0


@pytest.mark.parametrize(("engine", "loops"), [("minhop", 2), ("dfsssp", 2)])
def test_tables_of_the_engines_of_opensm(engine: str, loops: int) -> None:
    """Both reach all pairs and are cyclic on one lane: dfsssp spends lanes, minhop deadlocks."""
    whole = read_net((DATA / "real.net").read_text(), "real.net")
    check = Check(
        whole.net, read_tables((DATA / f"{engine}.lft").read_text(), whole, f"{engine}.lft")
    )
    assert (check.unreachable, len(check.credit_loops)) == (0, loops)


def test_verify_and_export_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--ibnetdiscover", str(DATA / "real.net"), "--lfts", str(DATA / "minhop.lft")]
    assert run_line(["net", "verify", *files, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["unreachable"], found["credit_loops"]) == (90, 0, 2)
    assert run_line(["net", "verify", *files[:2], "--json"]) == 0  # own routes
    assert json.loads(capsys.readouterr().out)["credit_loops"] == 0
    assert run_line(["net", "verify", *files[2:]]) == 1
    assert "--ibnetdiscover" in capsys.readouterr().err
    assert run_line(["net", "export", "--preset", "fat-tree2", "--to", str(tmp_path / "out")]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "out").iterdir())
    out = tmp_path / "out"
    files = ["--ibnetdiscover", str(out / names[0]), "--lfts", str(out / names[1])]
    assert run_line(["net", "verify", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["routes_per_link"] == [39, 39]


def cut(text: str, pattern: str, by: str) -> str:
    changed = re.sub(pattern, by, text, count=1, flags=re.MULTILINE)
    assert changed != text
    return changed


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], r"line \d+: (the cable leads|port|expected)"),
        (lambda text: text + NET, "appears twice; GUIDs"),
        (lambda text: cut(text, r'^Switch\t4 "', 'Switch "'), "line 4: expected Switch or Ca"),
        (lambda text: cut(text, r'^Switch\t4 "', 'Switch\t900 "'), "has 900 ports"),
        (lambda text: cut(text, r'^Switch\t4 "', 'Switch\t2 "'), "has no port 3; expected 1 to 2"),
        (lambda text: cut(text, r"^\[3\]", "[2]"), "port 2 of 'Z0L0' has two cables"),
        (lambda text: cut(text, r"^\[3\]", "[9]"), "does not lead back"),
        (lambda text: cut(text, r"^\[1\].*$", "[1] H"), r'line 5: expected \[port\] "peer"'),
        (lambda text: cut(text, r"^\[3\].*$", ""), "does not lead back"),
        (lambda _: "", "no cable joins a host"),
        (lambda _: "rubbish\n", "no cable joins a host"),
    ],
)
def test_damaged_networks(damage: Callable[[str], str], says: str) -> None:
    with pytest.raises(FabricError, match=says) as caught:
        read_net(damage(NET), "net.txt")
    assert "net.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: text.index("0x0003")], "ends inside the table"),
        (lambda text: text[: text.index("Unicast", 9)], "no table of 'Z0L1' and 12 others"),
        (lambda text: text + text, "appears twice"),
        (lambda text: cut(text, r"guid 0x0000f1fe", "guid 0x0000aaaa"), "no switch of the network"),
        (lambda text: cut(text, r"^0x0001 \d+", "0x0001 999"), "invalid port 999"),
        (lambda text: cut(text, r"^0x0001", "zz"), "line 2: expected"),
        (lambda text: cut(text, r"^Unicast.*\n", ""), "outside the table"),
        (lambda text: cut(text, r"^\d+ valid lids dumped\n", ""), "has no end"),
        (lambda text: cut(text, r"^\d+ valid lids", "3 valid lids"), "3 lids announced"),
    ],
)
def test_damaged_dumps(damage: Callable[[str], str], says: str) -> None:
    whole = read_net(NET, "net.txt")
    with pytest.raises(FabricError, match=says) as caught:
        read_tables(damage(TABLES), whole, "lft.dump")
    assert "lft.dump" in str(caught.value)


def test_a_network_without_lids_has_no_tables() -> None:
    bare = read_net(re.sub(r" lid \d+", "", NET), "net.txt")
    with pytest.raises(FabricError, match="gives no LID"):
        read_tables(TABLES, bare, "lft.dump")


def test_switches_and_hosts_with_one_description_are_told_apart() -> None:
    text = NET.replace('# "Z0L1"', '# "MF0"').replace('# "Z0L2"', '# "MF0"')
    text = text.replace('"z0n0"', '"node HCA"').replace('"z0n1"', '"node HCA"')
    net = read_net(text, "net.txt").net
    assert sum(name.startswith("MF0 S-") for name in net.switches) == 2
    assert sum(name.startswith("node HCA H-") for name in net.endpoints) == 2
