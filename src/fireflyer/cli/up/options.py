"""Options of `fireflyer up`."""

from pathlib import Path
from typing import Annotated

import typer

NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        "-n",
        min=1,
        max=10_000,
        help="Virtual nodes of the local engine. Remembered by the home. [default: one per "
        "type of GPU; 2 without GPUs]",
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        metavar="N:TYPE,...",
        help="GPUs of this machine, e.g. 8:a100, divided among the nodes. Remembered by the "
        "home. [default: those that the driver reports]",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="local|slurm",
        help="Run tasks on this machine or on a Slurm cluster. Remembered by the home.",
    ),
]
PartitionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Slurm partition; default: the cluster's.")
]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port on 127.0.0.1; 0: any free one. Remembered by the home. [default: 0]",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="timeshare, fifo, fifo-backfill, las or fairshare. Remembered by the home. "
        "[default: timeshare]",
    ),
]
LogLimitOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum size of a rank's log in one attempt, e.g. 512MiB. Beyond it the middle "
        "is dropped. Remembered by the home. [default: 4GiB]",
    ),
]
KeepOption = Annotated[
    bool, typer.Option("--keep", help="Leave tasks running when the server ends.")
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Use postgresql://USER@HOST:PORT/NAME instead of SQLite. Remembered by the home.",
    ),
]
DatabasePasswordFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Password file; default: PGPASSFILE.")
]
ListenOption = Annotated[
    str | None, typer.Option(metavar="ADDR:PORT", help="Also serve users with tokens here.")
]
TlsCertOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate for --listen, PEM.")
]
TlsKeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Private key of --tls-cert, PEM.")
]
BehindProxyOption = Annotated[
    bool, typer.Option("--behind-proxy", help="A proxy in front of --listen provides TLS.")
]
