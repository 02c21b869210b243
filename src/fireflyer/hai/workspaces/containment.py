"""Checks that a task's files are in its workspace. Imports only the standard library and
msgspec."""

import os

from fireflyer.errors import ConfigError
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.workspaces.manifest import Manifest


def check_inside(spec: TaskSpec, manifest: Manifest) -> None:
    """Rejects a script or a working directory that is not in the workspace.

    Raises:
        ConfigError: the script or the directory is missing.
    """
    kinds = {entry.path: entry.kind for entry in manifest.entries}
    if kinds.get(spec.script) not in ("file", "link"):
        raise ConfigError(
            f"the workspace has no script {spec.script!a}; is it ignored by a .gitignore file?"
        )
    if spec.cwd != "." and kinds.get(spec.cwd) != "directory":
        raise ConfigError(f"the workspace has no directory {spec.cwd!a} to run in")


def relative_to(workspace: str, path: str) -> str:
    """Returns a path relative to the workspace.

    Raises:
        ConfigError: the path is not in the workspace.
    """
    root, whole = os.path.realpath(workspace), os.path.abspath(path)
    folder = os.path.realpath(os.path.dirname(whole))
    found = os.path.relpath(os.path.join(folder, os.path.basename(whole)), root)
    if found == ".." or found.startswith("../"):
        raise ConfigError(f"{path} is not in the workspace {root}")
    return found


def folder_in(workspace: str, folder: str) -> str:
    """Returns a folder relative to the workspace, or the workspace's top if the folder is not in
    it."""
    try:
        return relative_to(workspace, folder)
    except ConfigError:
        return "."
