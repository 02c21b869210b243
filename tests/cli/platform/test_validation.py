"""The platform validates nodes: after a fault, drained, tested again, returned; and by request."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Shell
from tests.waiting import until

from fireflyer.errors import ConfigError, TaskError
from fireflyer.hai.model import PINNED, TaskSpec
from fireflyer.hai.model.validations import Ended, Entry, Returned, Started, Suspected
from fireflyer.validator import pairs

SECRET = b"sixteen bytes or more"

BUS_ERROR_ONCE = """
import os, signal
from fireflyer import hai

me = hai.task()
hai.heartbeat(1)
if me.attempt == 1:
    os.kill(os.getpid(), signal.SIGBUS)
print("done on", me.node)
"""

RULES = """
every_s = 0
retest_s = 0
checks = ["loopback", "network"]
secret_file = "{secret}"
peers = {{ n0 = "127.0.0.1:1", n1 = "127.0.0.1:{port}" }}
"""


@pytest.fixture
def rules(tmp_path: Path) -> Iterator[str]:
    """Settings with a listener of node n1."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with pairs.listen(("127.0.0.1", 0), SECRET) as listener:
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        yield RULES.format(secret=secret, port=listener.getsockname()[1])


def _serve(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            pairs.serve_one(listener, SECRET)


def entries(shell: Shell, node: str, kind: type[Entry]) -> list[Any]:
    return [entry for entry in shell.client.validations(node) if isinstance(entry, kind)]


def state(shell: Shell, node: str) -> tuple[str, str]:
    found = next(each for each in shell.client.nodes() if each.name == node)
    return found.state, found.reason


def test_a_node_fails_is_drained_tested_again_and_returns(shell: Shell, rules: str) -> None:
    shell.home.mkdir(mode=0o700, exist_ok=True)
    settings = shell.home / "validator.toml"
    settings.write_text(rules + '[limits."loopback latency"]\nmax = 0\n')
    shell.client.connect(shell.home, nodes=2)
    shell.run("run", "--start", "exec", shell.script(BUS_ERROR_ONCE))
    task = shell.client.task("t1")
    assert (task.state, task.attempt, task.avoid) == ("finished", 2, ("n0",))
    assert task.ranks[0].node == "n1"

    until(lambda: state(shell, "n0")[0] == "drained", lambda: shell.client.validations("n0")[-3:])
    assert "loopback latency" in state(shell, "n0")[1]
    until(
        lambda: len(entries(shell, "n0", Ended)) >= 2, lambda: shell.client.validations("n0")[-3:]
    )
    assert state(shell, "n0")[0] == "drained", "a retest that fails changes nothing"
    settings.write_text(rules)
    until(lambda: state(shell, "n0")[0] == "ready", lambda: shell.client.validations("n0")[-3:])

    until(lambda: bool(entries(shell, "n0", Returned)), lambda: shell.client.validations("n0")[-3:])
    first, *_, last = entries(shell, "n0", Started)
    assert (first.trigger, last.trigger) == ("fault", "return")
    assert [found.kind for found in entries(shell, "n0", Suspected)][:2] == ["exit", "validator"]
    for ended in entries(shell, "n0", Ended):
        figures = {found.name: found for found in ended.findings}
        assert figures["network bandwidth"].status == "passed", "sent to n1"
    shown = shell.run("validate", "node", "n0", "--history").stdout
    assert "loopback latency failed: " in shown
    assert "returned" in shown

    books = json.loads(shell.run("ledger", "--json", "--cluster").stdout)
    for account in (*books["tasks"].values(), books["cluster"]):
        assert sum(account["parts_s"].values()) == pytest.approx(account["whole_s"])
    validations = [each.task for each in entries(shell, "n0", Started)]
    for name in validations:
        parts = books["tasks"][name]["parts_s"]
        assert parts["validation"] > 0
        assert parts["useful"] == parts["starting"] == 0
    spent = sum(books["tasks"][name]["parts_s"]["validation"] for name in validations)
    assert books["cluster"]["parts_s"]["validation"] == pytest.approx(spent)


@pytest.mark.full
def test_requests_work_without_settings(shell: Shell) -> None:
    shell.client.connect(shell.home, nodes=2)
    shell.run("drain", "n1", "--reason", "fan 2")
    shell.run("validate", "node", "n1")
    until(lambda: bool(entries(shell, "n1", Ended)), lambda: shell.client.validations("n1"))
    (ended,) = entries(shell, "n1", Ended)
    assert ended.trigger == "requested"
    assert {found.status for found in ended.findings} == {"passed", "not run"}
    assert state(shell, "n1") == ("drained", "fan 2"), "an operator's drain is the operator's"
    assert entries(shell, "n0", Started) == []
    history = json.loads(shell.run("validate", "node", "n1", "--history", "--json").stdout)
    assert [entry["type"] for entry in history] == ["started", "ended"]


def test_users_can_neither_pin_tasks_nor_ask_for_unknown_nodes(shell: Shell) -> None:
    shell.client.connect(shell.home, nodes=1)
    script = shell.script("print(1)")
    spec = TaskSpec(script=script, cwd="/", labels={PINNED: "n0"})
    with pytest.raises(ConfigError, match="is set by the platform"):
        shell.client.submit(spec)
    with pytest.raises(TaskError, match="there is no node 'n7'"):
        shell.client.validate("n7")
