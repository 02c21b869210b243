"""Validation of submitted tasks, by the command line before it starts a server, and by the
server."""

import os
import shutil
import unicodedata

from fireflyer.errors import ConfigError
from fireflyer.hai.model import PINNED, TaskSpec
from fireflyer.hai.model.devices import is_type

RESERVED = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
"""Environment names that the platform sets for every rank."""

_OTHER_PROGRAMS = "start other programs from a Python script, e.g. with subprocess.run"

MAX_NAME = 200
MAX_REASON = 500
MAX_LABELS_BYTES = 16 << 10
MAX_STRING_BYTES = (128 << 10) - 1
"""Maximum size of an argument, and of an environment variable as NAME=VALUE: the limit of Linux for
one string."""
MAX_TEXT_BYTES = 1 << 20
"""Maximum size of arguments and environment together. Linux allows 2 MiB by default, including the
inherited environment."""


def check(spec: TaskSpec) -> None:
    """Rejects a spec with invalid fields.

    Raises:
        ConfigError: names the field.
    """
    check_text(spec)
    _check_lengths(spec)
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
        "cpus (--cpus)": (spec.cpus, 0, 1 << 16),
        "expected_s (--expect)": (spec.expected_s, 0, 1e9),
    }
    for field, (given, low, high) in limits.items():
        if not low <= given <= high:
            raise ConfigError(f"{field} must be from {low} to {high}, not {given}")
    if spec.gpu_type and not (spec.gpus and is_type(spec.gpu_type)):
        raise ConfigError(
            f"invalid gpu_type {spec.gpu_type!r} (--gpus): expected a type in small letters, with a "
            "number of GPUs, e.g. a100:2"
        )
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigError(f"environment variable {name!r} has no usable name or value")
        if name in RESERVED:
            raise ConfigError(f"environment variable {name} is set by the platform; leave it out")
    if any("\0" in argument for argument in spec.args):
        raise ConfigError("an argument of the script contains a NUL byte")


def _check_lengths(spec: TaskSpec) -> None:
    labels = sum(len(f"{name}={value}".encode()) for name, value in spec.labels.items())
    if labels > MAX_LABELS_BYTES:
        raise ConfigError(f"labels (--label) of {labels} bytes: at most {MAX_LABELS_BYTES}")
    texts = [(f"argument {n} of the script", text) for n, text in enumerate(spec.args, 1)]
    texts += [
        (f"environment variable {name!a:.60} (--env)", f"{name}={value}")
        for name, value in spec.env.items()
    ]
    total = 0
    for what, text in texts:
        size = len(text.encode())
        if size > MAX_STRING_BYTES:
            raise ConfigError(f"{what} has {size} bytes; Linux accepts at most {MAX_STRING_BYTES}")
        total += size + 1
    if total > MAX_TEXT_BYTES:
        raise ConfigError(
            f"arguments and environment have {total} bytes, more than {MAX_TEXT_BYTES}: "
            "pass the data in a file instead"
        )


def _check_paths(spec: TaskSpec) -> None:
    script = spec.script
    if not os.path.isabs(script):
        raise ConfigError(f"script {script!r} must be an absolute path")
    if os.path.isdir(script):
        raise ConfigError(f"script {script} is a directory; name a Python file")
    if not os.path.isfile(script):
        name = os.path.basename(script)
        hint = f"; {name} is a program: {_OTHER_PROGRAMS}" if shutil.which(name) else ""
        raise ConfigError(f"script {script} does not exist{hint}")
    if not os.access(script, os.R_OK):
        raise ConfigError(f"script {script} cannot be read")
    if _is_binary(script):
        raise ConfigError(f"script {script} is no Python file: {_OTHER_PROGRAMS}")
    if not os.path.isdir(spec.cwd):
        raise ConfigError(f"working directory {spec.cwd} does not exist")


def _is_binary(path: str) -> bool:
    """Returns whether a file begins with the magic number of an ELF program."""
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def check_text(spec: TaskSpec) -> None:
    """Rejects text that cannot be encoded or displayed. The operating system allows any byte in a
    name or an argument; JSON allows only Unicode.

    Raises:
        ConfigError: names the field.
    """
    texts = [("the script's path", spec.script), ("the working directory", spec.cwd)]
    texts += [("the task's name (--name)", spec.name), ("the group (--group)", spec.group)]
    texts.append(("the type of GPUs (--gpus)", spec.gpu_type))
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
    check_line("the task's name (--name)", spec.name, MAX_NAME)


def check_labels(spec: TaskSpec) -> None:
    """Rejects a user's task with a label that the platform sets.

    Raises:
        ConfigError: names the label.
    """
    if PINNED in spec.labels:
        raise ConfigError(f"label {PINNED} is set by the platform; leave it out")


def check_line(what: str, text: str, longest: int) -> None:
    """Rejects text that does not fit into a line of a table.

    Raises:
        ConfigError: names `what`.
    """
    if len(text) > longest:
        raise ConfigError(f"{what} has {len(text)} characters, more than {longest}")
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise ConfigError(f"{what} has control characters: {text!a}")


def check_drain(reason: str, until: float | None, now: float) -> None:
    """Rejects a drain without a reason, or with an end in the past.

    Raises:
        ConfigError: names the argument.
    """
    check_line("the reason", reason, MAX_REASON)
    if not reason.strip():
        raise ConfigError("a drain needs a reason")
    if until is not None and until <= now:
        raise ConfigError("the end of the drain must be in the future")
