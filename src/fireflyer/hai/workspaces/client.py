"""Client of workspaces: ship, list, pull, prune. Imports only the standard library and msgspec."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fireflyer.errors import WorkspaceError
from fireflyer.hai.client import Client
from fireflyer.hai.workspaces.blob_store import Offer, Pruned, WorkspaceView
from fireflyer.hai.workspaces.manifest import Entry, Manifest, decode, encode, identify
from fireflyer.hai.workspaces.materialize import place, write_all
from fireflyer.hai.workspaces.snapshot import DEFAULT_LIMIT, Snapshot, take
from fireflyer.hai.workspaces.stream import head
from fireflyer.hai.workspaces.venvs import check_lock

BATCH = 8 << 20
"""Bytes of small files that share a request; a larger file has a request of its own."""

OFFERS = 3
"""Maximum number of offers of a folder. Several may be needed, because a prune may remove blobs
between an upload and the next offer."""


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """Result of shipping a folder."""

    id: str
    files: int
    bytes: int
    sent_files: int
    sent_bytes: int
    left_out: tuple[str, ...]
    """Names that are neither ignored nor shipped, each with the reason."""


def ship(client: Client, folder: Path, limit: int = DEFAULT_LIMIT) -> Shipped:
    """Ships a folder to the server as a workspace; sends only files that the server does not have.

    Args:
        client: the platform.
        folder: folder to ship; later changes have no effect.
        limit: maximum bytes of all its files together.

    Raises:
        WorkspaceError: the folder cannot be shipped, or changed meanwhile.
    """
    return ship_snapshot(client, take(folder, limit, without=client.home.path))


def ship_snapshot(client: Client, snapshot: Snapshot) -> Shipped:
    """Ships a folder from a snapshot; otherwise like `ship`."""
    manifest = snapshot.manifest
    sizes, source = manifest.blobs(), snapshot.source()
    sent_files = sent_bytes = 0
    for _ in range(OFFERS):
        answer = client.call("POST", "/workspaces", body=encode(manifest))
        offer = msgspec.json.decode(answer, type=Offer)
        if not offer.missing:
            return Shipped(
                id=offer.id,
                files=sum(1 for _ in manifest.files()),
                bytes=manifest.bytes(),
                sent_files=sent_files,
                sent_bytes=sent_bytes,
                left_out=snapshot.left_out,
            )
        for batch in _batches(offer.missing, sizes):
            client.call("POST", "/workspaces/blobs", body=b"".join(_body(batch, sizes, source)))
            sent_files += len(batch)
            sent_bytes += sum(sizes[sha256] for sha256 in batch)
    raise WorkspaceError(
        "the server repeatedly lost files that were shipped to it; see its server.log"
    )


def _batches(missing: tuple[str, ...], sizes: dict[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for sha256 in missing:
        if batch and held + sizes[sha256] > BATCH:
            yield batch
            batch, held = [], 0
        batch.append(sha256)
        held += sizes[sha256]
    if batch:
        yield batch


def _body(batch: list[str], sizes: dict[str, int], source: dict[str, Path]) -> Iterator[bytes]:
    for sha256 in batch:
        try:
            data = source[sha256].read_bytes()
        except OSError as error:
            raise WorkspaceError(f"cannot read {error.filename}: {error.strerror}") from None
        if len(data) != sizes[sha256]:
            raise WorkspaceError(f"{source[sha256]} changed while it was shipped; ship again")
        yield head(sha256, len(data))
        yield data


def views(client: Client) -> list[WorkspaceView]:
    """Returns the user's workspaces, the most recently used first."""
    return msgspec.json.decode(client.call("GET", "/workspaces"), type=list[WorkspaceView])


def manifest_of(client: Client, name: str) -> Manifest:
    """Returns the manifest of a workspace.

    Args:
        client: the platform.
        name: id of the workspace, or at least its first 6 digits, or id of a task.

    Raises:
        WorkspaceError: no workspace matches, or several match.
    """
    if name.startswith("t"):
        task = client.task(name)
        if not task.spec.workspace:
            raise WorkspaceError(f"task {name} has no workspace: it was run without --workspace")
        name = task.spec.workspace
    elif len(name) < 64:
        known = {view.id for view in views(client)}
        found = [id for id in known if len(name) >= 6 and id.startswith(name)]
        if len(found) != 1:
            many = "several workspaces begin" if found else "no workspace begins"
            raise WorkspaceError(f"{many} with {name!a}; `fireflyer workspace list` lists them")
        name = found[0]
    if not name.isalnum():
        raise WorkspaceError(f"unknown workspace {name!a}; `fireflyer workspace list` lists them")
    return decode(client.call("GET", f"/workspaces/{name}"))


def pull(client: Client, name: str, folder: Path) -> Manifest:
    """Writes the shipped content of a workspace into a folder that does not exist or is empty.

    Args:
        client: the platform.
        name: as in `manifest_of`.
        folder: target folder; written completely or not at all.

    Raises:
        WorkspaceError: there is no such workspace, or the folder is not empty.
        Corrupted: bytes do not match their hash.
    """
    manifest = manifest_of(client, name)
    if folder.exists() and not (folder.is_dir() and not os.listdir(folder)):
        raise WorkspaceError(f"{folder} exists and is not an empty folder")
    workspace = identify(manifest)

    def fetch(entry: Entry, descriptor: int) -> None:
        data = client.call("GET", f"/workspaces/{workspace}/blobs/{entry.sha256}")
        write_all(descriptor, data)

    place(manifest, Path(os.path.abspath(folder)), fetch)
    return manifest


def prune(client: Client, older_than_h: float) -> Pruned:
    """Removes workspaces and environments that no task needs and that were not used for
    `older_than_h` hours."""
    answer = client.call("POST", "/workspaces/prune", {"older_than_h": older_than_h})
    return msgspec.json.decode(answer, type=Pruned)


def read_lock(file: Path) -> bytes:
    """Returns the content of a lock file.

    Raises:
        WorkspaceError: the file cannot be read, or does not pin every package by hash.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise WorkspaceError(f"cannot read the lock file {file}: {error.strerror}") from None
    check_lock(data)
    return data


def give_lock(client: Client, data: bytes) -> str:
    """Sends the content of a lock file to the server; returns its id.

    Raises:
        WorkspaceError: the server stored different content.
    """
    answer = client.call("POST", "/venvs", body=data)
    name = msgspec.json.decode(answer, type=dict[str, str])["id"]
    if name != hashlib.sha256(data).hexdigest():
        raise WorkspaceError("the lock file was damaged on its way to the server; send it again")
    return name
