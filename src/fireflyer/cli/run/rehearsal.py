"""Implementation of `fireflyer run --rehearse`: a task with injected faults, and a report."""

import sys
from pathlib import Path

from msgspec.structs import replace

from fireflyer.cli import printing
from fireflyer.cli.run.impl import Followed, Launch, follow_task, note, prepare
from fireflyer.errors import ConfigError
from fireflyer.hai.rehearsal.driver import Rehearsal
from fireflyer.hai.rehearsal.injector import check_engine
from fireflyer.hai.rehearsal.plan import check_shape, parse, shape_for
from fireflyer.hai.rehearsal.report import lines
from fireflyer.program import plain


def rehearsed(
    request: Launch,
    home: Path | None,
    text: str,
    *,
    detach: bool,
    all_ranks: bool,
    json: bool,
) -> int:
    """Runs the task with the events of `text`; returns 0 if the task survived all of them.

    Args:
        request: the task.
        home: the platform's folder.
        text: value of `--rehearse`.
        detach: rejected, because this process injects the events.
        all_ranks, json: as for `run`.
    """
    plan = parse(text)
    if detach:
        raise ConfigError("--rehearse injects its events from this process; omit --detach")
    if not request.shaped:
        nodes, ranks = shape_for(plan)
        request = replace(request, job=replace(request.job, nodes=nodes, ranks=ranks))
        if nodes * ranks > 1:
            note(f"rehearsing on {nodes} nodes with {ranks} ranks each, as the events require")
    check_shape(plan, request.job.nodes, request.job.ranks)
    spec, client = prepare(request, home)
    check_engine(client)
    view = client.submit(spec)
    rehearsal = Rehearsal(client, view, plan, note)
    rehearsal.start()
    followed = Followed(None)
    try:
        followed = follow_task(client, view, all_ranks=all_ranks, json=json)
    finally:
        if followed.state is None:
            rehearsal.leave()
    if followed.state is None:
        return followed.code
    found = rehearsal.finish()
    task = client.task(view.id)
    result = {"survived": found.survived, "rehearsal": found.events, "task": task}
    report = [f"{plain(line)}\n" for line in lines(found)]
    printing.show_result(result, lambda: sys.stdout.writelines(report), json=json)
    return 0 if found.survived else followed.code or 1
