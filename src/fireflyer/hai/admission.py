"""What a task must be to be taken in. Checked by the command line before it starts a server, and by the
server."""

import os
import unicodedata

from fireflyer.errors import ConfigError
from fireflyer.hai.model import TaskSpec

RESERVED = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
"""Environment names that the platform sets for every rank."""


def check(spec: TaskSpec) -> None:
    """Refuses a spec that cannot work.

    Raises:
        ConfigError: names the field.
    """
    check_text(spec)
    if not spec.workspace:
        _check_paths(spec)
    limits: dict[str, tuple[float, float, float]] = {
        "nodes (--nodes)": (spec.nodes, 1, 10_000),
        "ranks_per_node (--ranks)": (spec.ranks_per_node, 1, 1024),
        "max_restarts (--max-restarts)": (spec.max_restarts, 0, 1_000_000),
        "max_node_faults (--max-node-faults)": (spec.max_node_faults, 0, 1_000_000),
        "watchdog_s (--watchdog)": (spec.watchdog_s, 0, 30 * 86_400),
        "grace_s (--grace)": (spec.grace_s, 0, 86_400),
        "gpus (--gpus)": (spec.gpus, 0, 1024),
        "memory_mib (--memory)": (spec.memory_mib, 0, 1 << 40),
        "expected_s (--expect)": (spec.expected_s, 0, 1e9),
    }
    for field, (given, low, high) in limits.items():
        if not low <= given <= high:
            raise ConfigError(f"{field} must be from {low} to {high}, not {given}")
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigError(f"environment variable {name!r} has no usable name or value")
        if name in RESERVED:
            raise ConfigError(f"environment variable {name} is set by the platform; leave it out")
    if any("\0" in argument for argument in spec.args):
        raise ConfigError("an argument of the script contains a NUL byte")


def _check_paths(spec: TaskSpec) -> None:
    script = spec.script
    if not os.path.isabs(script):
        raise ConfigError(f"script {script!r} must be an absolute path")
    if os.path.isdir(script):
        raise ConfigError(f"script {script} is a directory; name a Python file")
    if not os.path.isfile(script):
        raise ConfigError(f"no script {script}")
    if not os.access(script, os.R_OK):
        raise ConfigError(f"script {script} cannot be read")
    if not os.path.isdir(spec.cwd):
        raise ConfigError(f"working directory {spec.cwd} does not exist")


def check_text(spec: TaskSpec) -> None:
    """Refuses text that cannot travel or be shown: the operating system lets any byte into a name or an
    argument, JSON only what is Unicode.

    Raises:
        ConfigError: names the field.
    """
    texts = [("the script's path", spec.script), ("the working directory", spec.cwd)]
    texts += [("the task's name (--name)", spec.name), ("the group (--group)", spec.group)]
    texts += [("a label (--label)", text) for item in spec.labels.items() for text in item]
    texts += [
        (f"argument {number} of the script", text) for number, text in enumerate(spec.args, 1)
    ]
    for name, value in spec.env.items():
        texts.append(("an environment variable's name (--env)", name))
        texts.append((f"environment variable {name!a} (--env)", value))
    for what, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{what} is not valid UTF-8: {text!a}") from None
    if any(unicodedata.category(character) == "Cc" for character in spec.name):
        raise ConfigError(f"the task's name (--name) has control characters: {spec.name!a}")
