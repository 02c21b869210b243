"""Implementation of `fireflyer workspace`."""

import stat
import sys
import time
from pathlib import Path

import msgspec

from fireflyer.cli import printing
from fireflyer.hai.client import Client
from fireflyer.hai.workspaces import client as shipping
from fireflyer.hai.workspaces.blob_store import WorkspaceView
from fireflyer.hai.workspaces.manifest import Entry, in_words
from fireflyer.program import plain, text


def list_all(home: Path | None, *, json: bool) -> None:
    """Prints all workspaces: `workspace list`."""
    client = Client(home)
    found = shipping.views(client)
    printing.show_result(found, lambda: _list_text(client, found), json=json)


def _list_text(client: Client, found: list[WorkspaceView]) -> None:
    tasks: dict[str, list[str]] = {}
    for task in client.tasks():
        tasks.setdefault(task.spec.workspace, []).append(task.id)
    now = time.time()
    for view in found:
        users = " ".join(tasks.get(view.id, ())) or "-"
        sys.stdout.write(
            f"{view.id[:12]}  {view.files:>6} files  {in_words(view.bytes):>10}  used "
            f"{(now - view.used) / 3600:.1f} h ago  tasks: {users}\n"
        )


def show(home: Path | None, which: str, *, json: bool) -> None:
    """Prints the entries of a workspace: `workspace show`."""
    manifest = shipping.manifest_of(Client(home), which)

    def show_text() -> None:
        for entry in manifest.entries:
            sys.stdout.write(plain(_line(entry)) + "\n")

    printing.show_result(msgspec.to_builtins(manifest), show_text, json=json)


def _line(entry: Entry) -> str:
    kinds = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}
    mode = stat.filemode(kinds[entry.kind] | (entry.mode or 0o777))
    leads = f" -> {entry.target}" if entry.target else ""
    return f"{mode} {entry.size:>12} {entry.path}{leads}"


def pull(home: Path | None, which: str, folder: Path, *, json: bool) -> None:
    """Writes a workspace into a folder: `workspace pull`."""
    manifest = shipping.pull(Client(home), which, folder)
    count, size = sum(1 for _ in manifest.files()), manifest.bytes()
    result = {"directory": text(str(folder)), "files": count, "bytes": size}
    line = f"{count} files, {in_words(size)}\n"
    printing.show_result(result, lambda: sys.stdout.write(line), json=json)


def prune(home: Path | None, older_than_h: float, *, json: bool) -> None:
    """Removes unused workspaces and environments: `workspace prune`."""
    gone = shipping.prune(Client(home), older_than_h)
    line = (
        f"removed {gone.workspaces} workspaces, {gone.blobs} files ({in_words(gone.bytes)}), "
        f"{gone.venvs} environments\n"
    )
    printing.show_result(gone, lambda: sys.stdout.write(line), json=json)
