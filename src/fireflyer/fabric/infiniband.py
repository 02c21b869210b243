"""Reader and writer of text of InfiniBand's tools: `ibnetdiscover` output and opensm's table dumps.

Cables, names and tables survive a round trip. GUIDs and LIDs of a written network are derived from
the indices of its switches and endpoints.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fireflyer.errors import FabricError
from fireflyer.fabric.net import HDR_BYTES_S, NOWHERE, Builder, Ints, Net
from fireflyer.fabric.routing import NO_PORT, Table

SWITCH_GUID = 0x0000_F1FE_0000_0000
HOST_GUID = 0x0000_F1FE_1000_0000

LANE_BYTES_S = {
    "SDR": 0.25e9, "DDR": 0.5e9, "QDR": 1e9, "FDR10": 1.25e9, "FDR": 1.7e9, "EDR": 3.125e9,
    "HDR": 6.25e9, "NDR": 12.5e9, "XDR": 25e9,
}  # fmt: skip
"""Bytes per second of one lane, by the name of its speed (InfiniBand Architecture, volume 2)."""

HEAD = re.compile(r'(Switch|Ca|Rt)\s+(\d+)\s+"([^"]+)"(?:\s*#\s*"([^"]*)")?')
CABLE = re.compile(r'\[(\d+)\](?:\([0-9a-fA-F]+\))?\s+"([^"]+)"\[(\d+)\](?:\([0-9a-fA-F]+\))?(.*)')
LAST_LID = 0xBFFF
"""Highest LID of a port; higher LIDs are multicast groups."""

WIDTHS = ("1", "2", "4", "8", "12")
SPEED = re.compile(r"\b(\d+)x(\w+)\s*$")
LID = re.compile(r"\blid (\d+)")
GUIDS = re.compile(r"switchguid=0x([0-9a-fA-F]+)")
TABLE = re.compile(r"Unicast lids \[.*\] of switch Lid (\d+) guid 0x([0-9a-fA-F]+)")
ENTRY = re.compile(r"0x([0-9a-fA-F]{1,4})\s+(\d{1,3}|UNREACHABLE)\b")
END = re.compile(r"(\d+) (?:valid )?lids dumped")


@dataclass(frozen=True)
class Site:
    """Network with the identifiers that InfiniBand's tools use.

    Attributes:
        net: the network.
        guids: GUID of each switch.
        lids: LID of each endpoint; 0 if the text has none.
    """

    net: Net
    guids: tuple[int, ...]
    lids: Ints


def site(net: Net) -> Site:
    """Assigns GUIDs and LIDs to a planned network."""
    guids = tuple(SWITCH_GUID + number for number in range(len(net.switches)))
    return Site(net, guids, np.arange(1, len(net.endpoints) + 1, dtype=np.int32))


def write_net(whole: Site) -> str:
    """Returns the network in the format of `ibnetdiscover`, which ibsim reads, too."""
    net, lines = whole.net, ["# Topology file"]
    first = len(net.endpoints) + 1
    hosts = _hosts(net)
    places = {end: (host, port) for host, ports in hosts.items() for port, end in ports.items()}
    numbers = {host: HOST_GUID + 16 * number for number, host in enumerate(hosts)}
    for one, name in enumerate(net.switches):
        guid = whole.guids[one]
        lines += ["", f"switchguid=0x{guid:x}({guid:x})"]
        lines.append(
            f'Switch\t{net.radix[one]} "S-{guid:016x}"\t# "{name}" base port 0 lid {first + one} lmc 0'
        )
        for port in range(1, int(net.radix[one]) + 1):
            peer, end = int(net.peers[one, port]), int(net.hosts[one, port])
            if peer >= 0:
                lines.append(
                    f'[{port}]\t"S-{whole.guids[peer]:016x}"[{net.peer_ports[one, port]}]'
                    f'\t# "{net.switches[peer]}" lid {first + peer} {_speed(net.rates[one, port])}'
                )
            elif end >= 0:
                host, its_port = places[end]
                guid = numbers[host]
                lines.append(
                    f'[{port}]\t"H-{guid:016x}"[{its_port}]({guid + its_port:x})'
                    f'\t# "{host}" lid {whole.lids[end]} {_speed(net.rates[one, port])}'
                )
    at, ports = net.attached
    for host, ends in hosts.items():
        guid = numbers[host]
        lines += ["", f"caguid=0x{guid:x}", f'Ca\t{max(ends)} "H-{guid:016x}"\t# "{host}"']
        for port, end in ends.items():
            if at[end] >= 0:
                lines.append(
                    f'[{port}]({guid + port:x})\t"S-{whole.guids[at[end]]:016x}"[{ports[end]}]'
                    f'\t# lid {whole.lids[end]} lmc 0 "{net.switches[at[end]]}" lid {first + at[end]} '
                    f"{_speed(net.endpoint_rates[end])}"
                )
    return "\n".join([*lines, ""])


def _speed(rate: float) -> str:
    """Returns the name of the four-lane speed that is nearest to a rate."""
    return "4x" + min(LANE_BYTES_S, key=lambda name: abs(4 * LANE_BYTES_S[name] - rate))


def _unicast(text: str) -> int:
    """Parses a LID; raises FabricError if no port can have this LID."""
    if len(text) > 5 or int(text) > LAST_LID:
        raise FabricError(f"invalid lid {text[:20]}: expected at most {LAST_LID}")
    return int(text)


def _rate(text: str) -> float:
    """Parses the speed at the end of a cable's line, in bytes per second; default: 4xHDR.

    Raises:
        FabricError: the number of lanes or the speed is invalid.
    """
    found = SPEED.search(text.rpartition('"')[2])
    if found is None:
        return HDR_BYTES_S
    if found[1] not in WIDTHS or found[2] not in LANE_BYTES_S:
        raise FabricError(f"invalid speed {found[0].strip()!r}: expected e.g. 4xHDR or 2xNDR")
    return int(found[1]) * LANE_BYTES_S[found[2]]


def _hosts(net: Net) -> dict[str, dict[int, int]]:
    """Returns the endpoints of each host by port, from names such as "n0/1"."""
    hosts: dict[str, dict[int, int]] = {}
    for end, name in enumerate(net.endpoints):
        host, _, port = name.rpartition("/")
        hosts.setdefault(host, {})[int(port)] = end
    return hosts


def write_tables(whole: Site, tables: Table) -> str:
    """Returns the tables in opensm's dump format; `opensm -R file -U FILE` loads this text."""
    net, lines = whole.net, []
    hosts, first = _hosts(net), len(net.endpoints) + 1
    words = [""] * len(net.endpoints)
    for number, (host, ends) in enumerate(hosts.items()):
        for port, end in ends.items():
            guid = HOST_GUID + 16 * number + port
            words[end] = f" : (Channel Adapter portguid 0x{guid:016x}: '{host}')"
    last = first + len(net.switches) - 1
    for one, name in enumerate(net.switches):
        guid = whole.guids[one]
        lines.append(
            f"Unicast lids [0x0-0x{last:x}] of switch Lid {first + one} guid 0x{guid:016x} ({name}):"
        )
        entries = [
            f"0x{whole.lids[end]:04x} {port:03d}{words[end]}"
            for end, port in enumerate(tables[one].tolist())
            if port != NO_PORT
        ]
        lines += [*entries, f"{len(entries)} valid lids dumped"]
    return "\n".join([*lines, ""])


def read_net(text: str, origin: str) -> Site:
    """Reads the output of `ibnetdiscover`.

    The result has one zone, because the text names none. The level of a switch is its distance from
    the nearest switch with endpoints.

    Raises:
        FabricError: a line is damaged, a cable has only one end, a GUID appears twice, or a port
            does not exist. The message has the line number.
    """
    builder, cables = Builder(), list(_sections(text, origin))
    indices: dict[str, int] = {}
    guids: list[int] = []
    names: dict[str, str] = {}
    described = Counter(name for _, _, _, name, _, _ in cables)
    for kind, radix, key, name, guid, place in cables:
        if key in names:
            raise FabricError(f"{place}: {key} appears twice; GUIDs of a network must differ")
        # If hosts or switches share a description, their keys distinguish them.
        shown = names[key] = name if described[name] == 1 else f"{name} {key}"
        if kind == "Switch":
            try:
                indices[key] = builder.switch(shown, radix, 0, 0)
            except FabricError as error:
                raise FabricError(f"{place}: {error}") from None
            guids.append(guid)
    lids: list[int] = []
    ends = _join(text, origin, indices, names, builder, lids)
    if not ends:
        raise FabricError(f"{origin}: no cable joins a host to a switch; expected at least one")
    net = builder.build()
    return Site(_with_levels(net), tuple(guids), np.array(lids, np.int32))


def _sections(text: str, origin: str) -> Iterator[tuple[str, int, str, str, int, str]]:
    """Yields kind, number of ports, key, name, GUID and position in the text of each switch and
    channel adapter."""
    announced = None
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{origin}, line {number}"
        if found := GUIDS.match(line):
            announced = int(found[1], 16)
        elif line.startswith(("Switch", "Ca", "Rt")):
            head = HEAD.match(line)
            if head is None:
                raise FabricError(f'{place}: expected Switch or Ca, ports and "name"')
            own = re.search(r"([0-9a-fA-F]{1,16})$", head[3])
            guid = announced if announced is not None else int(own[1], 16) if own else 0
            yield head[1], int(head[2]), head[3], head[4] or head[3], guid, place
            announced = None


def _join(
    text: str, origin: str, indices: dict[str, int], names: dict[str, str], builder: Builder,
    lids: list[int],
) -> int:  # fmt: skip
    """Adds the cables to `builder`, and the LIDs of endpoints to `lids`; returns the number of
    endpoints.

    Raises:
        FabricError: a line is damaged, or the text lists a cable at only one end.
    """
    owner, count, where = "", 0, {}
    taken: dict[tuple[str, int], tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{origin}, line {number}"
        if head := HEAD.match(line):
            owner = head[3]
        elif line.startswith("["):
            cable = CABLE.match(line)
            if cable is None or not owner:
                raise FabricError(f'{place}: expected [port] "peer"[port] below a Switch or Ca')
            near, far = (owner, int(cable[1])), (cable[2], int(cable[3]))
            if far[0] not in names:
                raise FabricError(
                    f"{place}: the cable leads to {far[0]!r}, which the text does not describe; "
                    "the file is truncated or filtered"
                )
            if near in taken:
                raise FabricError(f"{place}: port {near[1]} of {names[owner]!r} has two cables")
            taken[near], where[near] = far, (place, cable[4])
    for near, far in taken.items():
        place, rest = where[near]
        if taken.get(far) != near:
            raise FabricError(
                f"{place}: port {far[1]} of {names[far[0]]!r} does not lead back; the file is "
                "truncated or the cable was moved meanwhile"
            )
        try:
            if near[0] in indices and far[0] in indices and near <= far:
                builder.link(indices[near[0]], indices[far[0]], near[1], far[1], rate=_rate(rest))
            elif near[0] in indices and far[0] not in indices:
                end = f"{names[far[0]]}/{far[1]}"
                builder.endpoint(end, indices[near[0]], near[1], _rate(rest))
                lid = LID.search(rest)
                lids.append(_unicast(lid[1]) if lid else 0)
                count += 1
        except FabricError as error:
            raise FabricError(f"{place}: {error}") from None
    return count


def _with_levels(net: Net) -> Net:
    levels = np.where((net.hosts >= 0).any(axis=1), 0, NOWHERE).astype(np.int32)
    level = 0
    while np.any(levels == level):
        near = net.peers[levels == level]
        near = np.unique(near[near >= 0])
        level += 1
        levels[near[levels[near] == NOWHERE]] = level
    levels[levels == NOWHERE] = 0
    return replace(net, levels=levels)


def read_tables(text: str, whole: Site, origin: str) -> NDArray[np.uint8]:
    """Reads a dump of opensm.

    Returns:
        (S, E) tables in the order of `whole.net`, without entries for LIDs of switches.

    Raises:
        FabricError: a line is damaged, a switch is unknown, appears twice or is missing, or the
            dump ends inside a switch.
    """
    net = whole.net
    if not np.all(whole.lids > 0) or len(np.unique(whole.lids)) != len(whole.lids):
        raise FabricError(
            f"{origin}: the network text gives no LID, or one twice; use `ibnetdiscover` output "
            "from when the dump was written"
        )
    tables = np.full((len(net.switches), len(net.endpoints)), NO_PORT, np.uint8)
    rows = {guid: number for number, guid in enumerate(whole.guids)}
    columns = {int(lid): number for number, lid in enumerate(whole.lids)}
    seen: set[int] = set()
    row, count, place = -1, 0, origin
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{origin}, line {number}"
        if head := TABLE.match(line):
            if row >= 0:
                raise FabricError(f"{place}: the table before it has no end; the dump is damaged")
            guid = int(head[2], 16)
            if guid not in rows:
                raise FabricError(f"{place}: no switch of the network has GUID 0x{guid:016x}")
            row, count = rows[guid], 0
            if row in seen:
                raise FabricError(f"{place}: switch GUID 0x{guid:016x} appears twice")
            seen.add(row)
        elif end := END.match(line):
            if int(end[1]) < count:  # opensm prints the highest LID, which is at least the count
                raise FabricError(f"{place}: {end[1]} lids announced, {count} read")
            row = -1
        elif entry := ENTRY.match(line):
            if row < 0:
                raise FabricError(f"{place}: an entry outside the table of a switch")
            if entry[2] == "UNREACHABLE":
                continue
            count += 1
            port = int(entry[2])
            if port > NO_PORT:
                raise FabricError(f"{place}: invalid port {port}: expected 0 to {NO_PORT}")
            column = columns.get(int(entry[1], 16))
            if column is not None:
                tables[row, column] = port
        elif line.strip() and not line.startswith("#"):
            raise FabricError(
                f"{place}: expected `Unicast lids ...` or `0xLID PORT`: {line[:40]!r}"
            )
    if row >= 0:
        raise FabricError(f"{place}: the dump ends inside the table of {net.switches[row]!r}")
    missing = sorted(set(range(len(net.switches))) - seen)
    if missing:
        raise FabricError(
            f"{origin}: no table of {net.switches[missing[0]]!r} and {len(missing) - 1} others; "
            "the dump is truncated, or of another network"
        )
    return tables
