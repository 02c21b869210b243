"""Whether a cluster at rest holds what manifests say: names, lengths, bytes; and each replica the same.

`python -m tests.fs3.soak.verify CLUSTER.TOML CHUNK MANIFEST...`: prints a `Verdict` as JSON. Without a
manifest it only looks for damaged replicas, in a cluster that may be at work.
"""

import contextlib
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from tests.fs3 import frames
from tests.fs3.soak.contents import SHARED, SLOT, Manifest, Record
from tests.waiting import LIMIT_S

from fireflyer.errors import FireflyerError
from fireflyer.fs3.client import Client, Settings
from fireflyer.fs3.client.data import layout_of
from fireflyer.fs3.client.discovery import attach, find
from fireflyer.fs3.client.settings import find_secret
from fireflyer.fs3.data_connections import dial
from fireflyer.fs3.layout import chains_of
from fireflyer.fs3.manager.chains import Public
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import SLOTS
from fireflyer.fs3.meta.inode import FILE, Inode
from fireflyer.fs3.roles import Role
from fireflyer.fs3.survey import tree

THREADS = 4
REPAIR_S = 60.0
"""Within which the scrub must have found and repaired what was damaged."""

Seen = tuple[int, int, bytes] | str
"""Of a replica: status (OK or not found), version and bytes; or one of BAD."""

BAD = {"damaged", "away", "stale", "refused"}
"""Its bytes do not match; its node cannot be asked; it knows another version of its chain than the manager
told us; another status. None of them may last."""


class Verdict(msgspec.Struct):
    """Counts, and a line for each thing that is lost or wrong."""

    files: int = 0
    bytes: int = 0
    replicas: int = 0
    doubtful: int = 0
    problems: list[str] = []


def _seen(read: frames.Found) -> Seen:
    if read.status == frames.STALE_ROUTING:
        return "stale"
    if read.status not in (frames.OK, frames.NOT_FOUND):
        return "refused"
    return read.status, read.version, read.data


class Replicas:
    """Reads chunks from each member of their chains; one thread."""

    def __init__(self, config: str) -> None:
        place = find(config)
        self._secret = find_secret(place.secret_file)
        self._link = ManagerLink(place.addresses, self._secret, Role.CLIENT)
        self._link.refresh()
        self._lines: dict[int, socket.socket] = {}
        self._until = time.monotonic() + REPAIR_S

    def differences(self, inode: Inode) -> tuple[int, list[str]]:
        """How many replicas of chunks were read, and what is wrong with them.

        What is bad is looked at again for as long as repairs may take: a node that was started again a
        moment ago may not listen yet, though the manager never missed it, and chains change meanwhile.
        """
        layout = layout_of(inode)
        table = self._link.table(layout.table, layout.table_version)
        assert table
        count = -(-inode.length // layout.chunk_size)
        chains = chains_of(layout, table.chains, np.arange(count)).tolist() if count else []
        found: list[str] = []
        replicas = 0
        for index, number in enumerate(chains):
            seen = self._replicas(inode, index, number)
            while BAD & set(seen.values()) and time.monotonic() < self._until:
                time.sleep(0.2)
                self._link.refresh()
                seen = self._replicas(inode, index, number)
            replicas += len(seen)
            if len(set(seen.values())) > 1 or BAD & set(seen.values()):
                told = {
                    t: s if isinstance(s, str) else (*s[:2], len(s[2])) for t, s in seen.items()
                }
                found.append(f"inode {inode.number} chunk {index} on chain {number}: {told}")
        return replicas, found

    def _replicas(self, inode: Inode, index: int, number: int) -> dict[int, Seen]:
        chain = self._link.chain(number)
        assert chain
        seen: dict[int, Seen] = {}
        for target in chain.targets(Public.SERVING):
            ask = [(inode.number, index, 0, layout_of(inode).chunk_size)]
            node = target // SLOTS
            try:
                read = frames.read(self._line(node), (number, chain.version), ask)
            except AssertionError:
                seen[target] = "damaged"
            except (FireflyerError, OSError):
                seen[target] = "away"
                if line := self._lines.pop(node, None):
                    line.close()
            else:
                seen[target] = _seen(read[0])
        return seen

    def _line(self, node: int) -> socket.socket:
        if node not in self._lines:
            address = self._link.address(node)
            assert address
            self._lines[node] = dial(address, self._secret, Role.CLIENT)
            self._lines[node].settimeout(LIMIT_S)
        return self._lines[node]

    def close(self) -> None:
        self._link.close()
        for line in self._lines.values():
            line.close()


def _file(client: Client, chunk: int, record: Record) -> tuple[Inode | None, int, str]:
    """The file, how many bytes it has, and what is wrong with it."""
    low, high = record.lengths()
    for name in record.names:
        try:
            inode = client.inode(name)
            with client.open(name) as file:
                seen = np.frombuffer(file.pread(high + 1, 0), np.uint8)
                size = file.size
        except FileNotFoundError:
            continue
        if record.under and not client.exists(record.under):
            return None, 0, ""  # the other one has this name
        if not low <= size <= high:
            return inode, size, f"{name}: {size} bytes long, not {low} to {high}"
        wrong = record.wrong(seen, chunk)
        return inode, size, f"{name}: {wrong}" if wrong else ""
    if record.may_be_gone or record.under:
        return None, 0, ""
    return None, 0, f"{record.names}: not there"


def verify(config: str, chunk: int, manifests: list[Manifest]) -> Verdict:
    verdict = Verdict()
    with attach(config, settings=Settings(deadline_s=30.0)) as client:
        inodes: list[Inode] = []

        def look(record: Record) -> tuple[Inode | None, int, str]:
            try:
                return _file(client, chunk, record)
            except (FireflyerError, OSError) as error:
                return None, 0, f"{record.names}: {error!r}"

        records = [record for manifest in manifests for record in manifest.files]
        with ThreadPoolExecutor(THREADS) as threads:
            for record, (inode, size, problem) in zip(
                records, threads.map(look, records), strict=True
            ):
                verdict.doubtful += record.doubtful
                if problem:
                    verdict.problems.append(problem)
                if inode is not None:
                    inodes.append(inode)
                    verdict.files += 1
                    verdict.bytes += size
        _names(client, manifests, verdict)
        inodes.append(_slots(client, chunk, manifests, verdict))
    _replicas(config, inodes, verdict)
    return verdict


def _slots(client: Client, chunk: int, manifests: list[Manifest], verdict: Verdict) -> Inode:
    """The file that all share."""
    with client.open(SHARED) as file:
        seen = np.frombuffer(file.readall(), np.uint8)
    for slot in (slot for manifest in manifests for slot in manifest.slots):
        end = slot.lengths()[1]
        verdict.doubtful += slot.doubtful
        if len(seen) < slot.length:
            verdict.problems.append(f"{SHARED}: {len(seen)} bytes long, not {slot.length}")
        elif wrong := slot.wrong(seen[max(0, end - SLOT) : end], chunk, max(0, end - SLOT)):
            verdict.problems.append(f"{SHARED}: {wrong}")
    return client.inode(SHARED)


def damage(config: str) -> Verdict:
    """What no repair comes to, of all files that are there now."""
    verdict = Verdict()
    with attach(config, settings=Settings(deadline_s=30.0)) as client:
        inodes = []
        for found in tree(client, "/"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                inodes.append(client.inode(found.path))
    _replicas(config, [inode for inode in inodes if inode.kind == FILE], verdict)
    verdict.problems = [text for text in verdict.problems if any(bad in text for bad in BAD)]
    return verdict


def _names(client: Client, manifests: list[Manifest], verdict: Verdict) -> None:
    allowed = {name for m in manifests for record in m.files for name in record.names}
    for folder in (folder for manifest in manifests for folder in manifest.folders):
        for name in client.listdir(folder):
            if f"{folder}/{name}" not in allowed:
                verdict.problems.append(f"{folder}/{name} should not be there")


def _replicas(config: str, inodes: list[Inode], verdict: Verdict) -> None:
    replicas = Replicas(config)
    for inode in inodes:
        count, found = replicas.differences(inode)
        verdict.replicas += count
        verdict.problems += found
    replicas.close()


def main() -> int:
    config, chunk, *paths = sys.argv[1:]
    manifests = [msgspec.msgpack.decode(Path(p).read_bytes(), type=Manifest) for p in paths]
    verdict = verify(config, int(chunk), manifests) if manifests else damage(config)
    print(msgspec.json.encode(verdict).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
