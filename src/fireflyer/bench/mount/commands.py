"""`fireflyer bench mount`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench.harness import options
from fireflyer.bench.harness.command_line import (
    FileSystemsAt,
    JsonOption,
    OutputOption,
    PeerPrograms,
    Quick,
    Rounds,
    names_of,
    progress,
    report,
    say,
)
from fireflyer.bench.harness.report import Machine


def mount(
    work: FileSystemsAt = Path("bench-mount"),
    peers: PeerPrograms = None,
    passthrough: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Program passthrough_hp of libfuse's examples."),
    ] = None,
    only: Annotated[str, typer.Option(help="Cases: read, create, find.")] = ",".join(options.MOUNT),
    quick: Quick = False,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the mounted file system (fs3). Needs root, libfuse3 and /dev/fuse.

    The peers are JuiceFS, libfuse's passthrough_hp, and our client without a mount.

    \b
    fireflyer bench mount --passthrough ~/libfuse/build/example/passthrough_hp
    fireflyer bench mount --only create --output mount.json
    """
    machine = Machine.here()
    cases = names_of("--only", only, options.MOUNT)
    from fireflyer.bench.fs.context import QUICK, WHOLE, Spec
    from fireflyer.bench.mount import cases as bench

    spec = Spec(
        work=work,
        peers=peers or work / "peers",
        only=cases,
        rounds=rounds,
        sizes=QUICK if quick else WHOLE,
        passthrough=passthrough,
    )
    rows = bench.run(spec, progress())
    say("")
    report("mount", machine, rows, [], json=json, output=output)
