"""Start of a task for `fireflyer run`: with injected faults, profiled, or without either."""

from pathlib import Path

from fireflyer.cli.run.impl import Launch, launch
from fireflyer.errors import ConfigError


def start_as_asked(
    request: Launch, home: Path | None, rehearse: str | None, prof: str | None,
    *, detach: bool, all_ranks: bool, json: bool,
) -> int:  # fmt: skip
    """Runs the task: with the faults of `rehearse`, profiled with the options `prof`, or plain.

    Raises:
        ConfigError: both `rehearse` and `prof` are given.
    """
    if rehearse is not None and prof is not None:
        raise ConfigError("--prof and --rehearse exclude each other")
    if prof is not None:
        from fireflyer.cli.run.profiling import profiled

        return profiled(request, home, prof, detach=detach, all_ranks=all_ranks, json=json)
    if rehearse is not None:
        from fireflyer.cli.run.rehearsal import rehearsed

        return rehearsed(request, home, rehearse, detach=detach, all_ranks=all_ranks, json=json)
    return launch(request, home, detach=detach, all_ranks=all_ranks, json=json)
