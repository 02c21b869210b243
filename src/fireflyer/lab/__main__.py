"""`fireflyer lab --hosts 4 --rate 1gbit -- COMMAND`: runs a command once on each host of a lab."""

import subprocess
import sys
import threading
from typing import IO, Annotated

import typer

from fireflyer.lab.hosts import Lab, remove_stale
from fireflyer.program import run_app

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_output = threading.Lock()


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    command: Annotated[
        list[str] | None, typer.Argument(help="Command to run on each host, after --.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[str | None, typer.Option(help='Speed of each cable, e.g. "1gbit".')] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Use loopback addresses if there are no namespaces.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove the namespaces of labs whose processes have died."),
    ] = False,
) -> None:
    """Run a command on every host of a lab; RANK is the host's number, WORLD_SIZE the number of hosts.

    Exits with the worst status of the commands.
    """
    if not clean and not command:
        raise typer.BadParameter("give a command after --, or --clean")
    if clean:
        for name in remove_stale():
            typer.echo(f"removed {name}")
    raise typer.Exit(run(command, hosts, rate, fallback) if command else 0)


def run(command: list[str], hosts: int, rate: str | None, fallback: bool) -> int:
    """Runs a command once on each host; returns the worst exit status, 128 + n after signal n."""
    with Lab(hosts, rate, fallback=fallback) as lab:
        if not lab.isolated:
            typer.echo(
                "no namespaces: using loopback addresses without shaping and counters", err=True
            )
        port = lab.hosts[0].free_port()
        processes = []
        copiers = []
        for host in lab.hosts:
            process = lab.popen(
                host.index,
                command,
                lab.job_env(host.index, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            processes.append(process)
            for source, target in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            ):
                assert source is not None
                copier = threading.Thread(
                    target=_copy, args=(f"{host.name}| ".encode(), source, target)
                )
                copier.start()
                copiers.append(copier)
        statuses = [process.wait() for process in processes]
        for copier in copiers:
            copier.join()
    return max(status if status >= 0 else 128 - status for status in statuses)


def _copy(prefix: bytes, source: IO[bytes], target: IO[bytes]) -> None:
    with source:
        for line in source:
            with _output:
                target.write(prefix + line if line.endswith(b"\n") else prefix + line + b"\n")
                target.flush()


if __name__ == "__main__":
    sys.exit(run_app(app, "fireflyer lab", sys.argv[1:]))
