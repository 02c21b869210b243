"""Implementation of `fireflyer validate`."""

import csv
import io
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fireflyer.cli.printing import show_result, table
from fireflyer.errors import ConfigError
from fireflyer.program import plain
from fireflyer.validator import fleet as fleets
from fireflyer.validator import limits, pairs, runner
from fireflyer.validator.judgement import CheckJudgement
from fireflyer.validator.model import Check, Result, Settings, all_checks, chosen

DRILL = "FIREFLYER_VALIDATOR_DRILL"
"""Environment variable that names a check; a fault is injected while that check runs."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a validation."""

    quick: bool
    checks: tuple[str, ...]
    limits: Path | None
    directory: Path | None
    memory_mib: int
    fs3: str
    peers: tuple[str, ...]
    secret_file: Path | None
    csv: Path | None
    node: str
    round: str


def list_checks(*, json: bool) -> None:
    """Prints the checks, their figures and what they need."""
    checks = all_checks()
    rows = [
        (
            check.name,
            figure.name,
            figure.unit,
            figure.better,
            f"{check.duration_s:g} s",
            check.needs,
        )
        for check in checks
        for figure in check.figures
    ]
    heads = ("CHECK", "FIGURE", "UNIT", "BETTER", "QUICK", "NOTE")
    result = [msgspec.to_builtins(check) for check in checks]
    show_result(result, lambda: table(heads, rows), json=json)


def check_node(request: Request, *, json: bool) -> int:
    """Runs checks on this node and prints their results; returns 1 if one failed."""
    checks = chosen(all_checks(), request.checks)
    for peer in request.peers:
        pairs.parse_address(peer)
    if request.peers:
        pairs.read_secret(request.secret_file)
    if request.csv is not None:
        columns = _check_csv(request.csv, request.round)
    directory = request.directory
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"invalid --directory {directory}: expected a folder")
    settings = Settings(
        quick=request.quick,
        directory="" if directory is None else str(directory.absolute()),
        fs3=request.fs3,
        peers=request.peers,
        secret_file="" if request.secret_file is None else str(request.secret_file.absolute()),
        memory_mib=request.memory_mib,
        drill=os.environ.get(DRILL, ""),
    )
    bounds = None
    if request.limits is not None:
        bounds = limits.read(request.limits, _figures(all_checks()))
    results = []
    budget_s = runner.QUICK_S if request.quick else None
    for result in runner.run(checks, settings, bounds, budget_s=budget_s):
        results.append(result)
        _progress(f"{len(results)}/{len(_figures(checks))} {result.name}")
    _progress("")
    keys = ("name", "status", "value", "unit", "reason")
    found = {"checks": [{key: getattr(result, key) for key in keys} for result in results]}
    heads, rows = ("CHECK", "STATE", "VALUE", "UNIT", "REASON"), [_row(one) for one in results]
    show_result(found, lambda: table(heads, rows), json=json)
    if request.csv is not None:
        _append(request.csv, columns, request, results)
    return 1 if any(result.status == "failed" for result in results) else 0


def _figures(checks: tuple[Check, ...]) -> set[str]:
    return {figure.name for check in checks for figure in check.figures}


def _progress(text: str) -> None:
    """Shows a line on a terminal, in place of the previous line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{plain(text)}")
        sys.stderr.flush()


def _rounded(value: float) -> str:
    """Returns a value with four digits; from 1,000 on, with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


def _row(result: Result) -> tuple[str, ...]:
    value = "-" if result.value is None else _rounded(result.value)
    return (result.name, result.status, value, result.unit, result.reason)


def _check_csv(path: Path, of_round: str) -> tuple[str, ...]:
    """Rejects a file to which samples cannot be appended; called before the checks begin.

    Returns:
        Columns of the file, or of the file that will be created.
    """
    with_round = (*fleets.COLUMNS, fleets.ROUND)
    try:
        with path.open("a+", newline="", encoding="utf-8") as file:
            if not path.is_file():
                raise ConfigError(f"invalid --csv {path}: expected a regular file")
            file.seek(0)
            new = with_round if of_round else fleets.COLUMNS
            head = tuple(next(csv.reader(file), new))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"invalid --csv {path}: {error}") from None
    if head != with_round and (head != fleets.COLUMNS or of_round):
        wanted = with_round if of_round else fleets.COLUMNS
        raise ConfigError(f"invalid --csv {path}: expected the columns {','.join(wanted)}")
    return head


def _append(path: Path, columns: tuple[str, ...], request: Request, results: list[Result]) -> None:
    """Appends the samples of the results that have a value: all samples, or none after an error.

    Raises:
        ConfigError: the file cannot be written.
    """
    node = request.node or socket.gethostname()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for result in results:
        if result.value is not None:
            for value in result.samples or (result.value,):
                row = (node, result.name, repr(value), result.better, request.round)
                writer.writerow(row[: len(columns)])
    head = f"{','.join(columns)}\n"
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            before = os.fstat(file).st_size
            if before:
                head = "" if os.pread(file, 1, before - 1) == b"\n" else "\n"
            data = (head + text.getvalue()).encode()
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                os.ftruncate(file, before)
                raise
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"cannot append the samples to {path}: {error.strerror}") from None


def listen(address: str, secret_file: Path) -> None:
    """Serves the network checks of other nodes, each in a thread, until the process ends."""
    secret = pairs.read_secret(secret_file)
    with pairs.listen(pairs.parse_address(address), secret) as listener:
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"listening on {host}:{port}\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, secret), daemon=True).start()


def _serve(connection: socket.socket, secret: bytes) -> None:
    with connection:
        pairs.serve(connection, secret)


def fleet(file: Path, *, json: bool) -> None:
    """Prints the judgement of a file of measurements."""
    judged = fleets.judge_fleet(fleets.read(file))
    show_result(fleets.report(judged), lambda: _show_fleet(judged), json=json)


def _show_fleet(judged: Sequence[CheckJudgement]) -> None:
    table(
        ("CHECK", "NODES", "SAMPLES", "CRITERION", "SCATTER", "THRESHOLD", "DEFECTIVE", "NOTE"),
        [_check_row(of_check) for of_check in judged],
    )
    rows = [
        (
            node.node, of_check.check, f"{node.similarity:.4f}", f"{node.deviation:.1f}", node.part,
            f"{node.median:.6g}", "yes" if node.fixed else "no", "yes" if node.zscore else "no",
        )
        for of_check in judged
        for node in sorted(of_check.nodes, key=lambda node: node.similarity)
        if node.defective
    ]  # fmt: skip
    if rows:
        sys.stdout.write("\n")
        heads = ("NODE", "CHECK", "SIMILARITY", "SIGMAS", "PART", "MEDIAN", "5 % RULE", "Z RULE")
        table(heads, rows)
    else:
        sys.stdout.write("\nno node is defective\n")


def _check_row(of_check: CheckJudgement) -> tuple[str, ...]:
    samples = sum(node.samples for node in of_check.nodes)
    defective = sum(node.defective for node in of_check.nodes)
    found = [plain(of_check.check), f"{len(of_check.nodes)}", f"{samples}"]
    if of_check.criterion is None or of_check.threshold is None or of_check.scatter is None:
        return (*found, "-", "-", "-", "-", of_check.reason)
    return (
        *found, f"{of_check.criterion:.6g}", f"{of_check.scatter:.2%}",
        f"{of_check.threshold:.4f}", f"{defective}", "",
    )  # fmt: skip
