"""How a task's ranks are started where the user left it open (`start="auto"`).

A fork server with torch imported pays where ranks import torch, and costs seconds where they do not. So the
script says: what it imports, by its text and that of the modules beside it; and what an earlier attempt of
the task was seen to have loaded.
"""

import ast
import os
from pathlib import Path
from typing import Literal

WITH_TORCH = frozenset({
    "accelerate", "deepspeed", "diffusers", "hfai", "lightning", "peft", "pytorch_lightning", "timm", "torch",
    "torchaudio", "torchvision", "transformers", "trl",
})  # fmt: skip
"""Packages that import torch, or whose users do."""

OURS_WITH_TORCH = (
    "fireflyer.checkpoint",
    "fireflyer.ffrecord.torch",
    "fireflyer.haiscale",
    "fireflyer.hfreduce",
)

MOST_FILES = 200
"""So many files of a script are read at most."""

MARK = "imports-torch"
"""A file in the task's folder: a rank was seen with torch loaded."""

LIBRARY = b"/libtorch"
"""Begins the name of a file that every process with torch has mapped."""


def start_of(script: str, task: Path) -> Literal["fork", "exec"]:
    """How the ranks of a script are started; `task`: the folder of its task."""
    return "fork" if (task / MARK).exists() or imports_torch(script) else "exec"


def imports_torch(script: str) -> bool:
    """Whether the script, or a module beside it that it imports, has an import of torch anywhere in its text.

    What cannot be read or parsed imports nothing: the rank will say why.
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
    """Full names of the modules that a file may import; of `from a import b` both a and a.b."""
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
    """The files beside the script that an import of this name runs."""
    found: list[str] = []
    path = folder
    for part in name.split("."):
        path = os.path.join(path, part)
        found += [f"{path}.py", os.path.join(path, "__init__.py")]
    return [file for file in found if os.path.isfile(file)]


def has_loaded_torch(pid: int) -> bool:
    """Whether a process has torch's library mapped; False for one that has ended."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return LIBRARY in file.read()
    except OSError:
        return False
