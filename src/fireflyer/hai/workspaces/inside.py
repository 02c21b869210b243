"""What of a task must be in its workspace. Standard library and msgspec only."""

import os

from fireflyer.errors import ConfigError
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.workspaces.manifest import Manifest


def check_inside(spec: TaskSpec, manifest: Manifest) -> None:
    """Refuses a script or a working directory that the workspace does not have.

    Raises:
        ConfigError: it has not.
    """
    kinds = {entry.path: entry.kind for entry in manifest.entries}
    if kinds.get(spec.script) not in ("file", "link"):
        raise ConfigError(
            f"the workspace has no script {spec.script!a}; is it ignored by a .gitignore file?"
        )
    if spec.cwd != "." and kinds.get(spec.cwd) != "directory":
        raise ConfigError(f"the workspace has no directory {spec.cwd!a} to run in")


def relative_to(workspace: str, path: str) -> str:
    """A path as the workspace has it.

    Raises:
        ConfigError: it is not in the workspace.
    """
    root, whole = os.path.realpath(workspace), os.path.abspath(path)
    folder = os.path.realpath(os.path.dirname(whole))
    found = os.path.relpath(os.path.join(folder, os.path.basename(whole)), root)
    if found == ".." or found.startswith("../"):
        raise ConfigError(f"{path} is not in the workspace {root}")
    return found


def folder_in(workspace: str, folder: str) -> str:
    """A folder as the workspace has it; its top where the folder is not in it."""
    try:
        return relative_to(workspace, folder)
    except ConfigError:
        return "."
