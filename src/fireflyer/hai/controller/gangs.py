"""Turns a task's row into the gang that an engine starts."""

import os
from pathlib import Path

from fireflyer.hai.database.store import Row
from fireflyer.hai.model.admission import RESERVED
from fireflyer.hai.model.engine import Gang
from fireflyer.hai.workspaces.tasks import Paths


def gang_of(
    row: Row, secret: str, paths: Paths, directory: Path, nodes: tuple[str, ...],
    devices: tuple[tuple[int, ...], ...],
) -> Gang:  # fmt: skip
    """Returns the gang of the attempt in `directory`; the folder's name is the attempt's number."""
    spec = row.spec
    inherited = {k: v for k, v in os.environ.items() if k not in RESERVED}
    return Gang(
        task=row.task, attempt=int(directory.name), script=paths.script, args=spec.args,
        cwd=paths.cwd, env=paths.environment(inherited) | spec.env, python=paths.python,
        nodes=nodes, ranks_per_node=spec.ranks_per_node, start=spec.start, secret=secret,
        directory=directory, elastic=spec.elastic, rejoins=spec.max_restarts - row.restarts,
        gpus=spec.gpus, gpu_type=spec.gpu_type, devices=devices, memory_mib=spec.memory_mib,
        cpus=spec.cpus,
    )  # fmt: skip
