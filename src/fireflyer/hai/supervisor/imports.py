"""Chooses the start method of a task's ranks for `start="auto"`.

A fork server with torch imported pays off if ranks import torch, and costs seconds if they do not.
The choice depends on the imports in the source of the script and of the modules in its folder. It
also depends on whether an earlier attempt of the task had loaded torch.
"""

import ast
import os
from pathlib import Path
from typing import Literal

WITH_TORCH = frozenset({
    "accelerate", "deepspeed", "diffusers", "hfai", "lightning", "peft", "pytorch_lightning", "timm", "torch",
    "torchaudio", "torchvision", "transformers", "trl",
})  # fmt: skip
"""Packages that import torch, or whose users usually import torch."""

OURS_WITH_TORCH = (
    "fireflyer.checkpoint",
    "fireflyer.ffrecord.torch",
    "fireflyer.haiscale",
    "fireflyer.hfreduce",
)

MOST_FILES = 200
"""Maximum number of files to read for a script."""

MARK = "imports-torch"
"""File in the task's folder which records that a rank had loaded torch."""

LIBRARY = b"/libtorch"
"""Start of the name of a library that every process with torch has mapped."""


def start_of(script: str, task: Path) -> Literal["fork", "exec"]:
    """Returns the start method for the ranks of a script; `task`: folder of the task."""
    return "fork" if (task / MARK).exists() or imports_torch(script) else "exec"


def imports_torch(script: str) -> bool:
    """Returns whether the script, or a module that it imports from its own folder, imports torch.

    A file that cannot be read or parsed counts as a file without imports; the rank itself reports
    the error.
    """
    folder = os.path.dirname(script)
    waiting, seen = [script], {script}
    while waiting and len(seen) <= MOST_FILES:
        path = waiting.pop()
        for name in _imported(path):
            if name.split(".")[0] in WITH_TORCH or _within(name, OURS_WITH_TORCH):
                return True
            for found in _beside(folder, name):
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)
    return False


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _imported(path: str) -> set[str]:
    """Returns the full names of the modules that a file may import; for `from a import b` both a
    and a.b."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not node.level:
                names.add(module)
            names.update(f"{module}.{alias.name}".lstrip(".") for alias in node.names)
    return names


def _beside(folder: str, name: str) -> list[str]:
    """Returns the files in the script's folder that an import of this name runs."""
    found: list[str] = []
    path = folder
    for part in name.split("."):
        path = os.path.join(path, part)
        found += [f"{path}.py", os.path.join(path, "__init__.py")]
    return [file for file in found if os.path.isfile(file)]


def has_loaded_torch(pid: int) -> bool:
    """Returns whether a process has mapped torch's library; False if the process has ended."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return LIBRARY in file.read()
    except OSError:
        return False
