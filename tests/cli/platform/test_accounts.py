"""`fireflyer user`, `group`, `token`, `quota`, `audit`, and the options of `up` that concern users."""

import json
import os
import stat
from collections.abc import Callable

import pytest
from tests.cli.conftest import Running, Shell


@pytest.fixture
def served(shell: Shell, started: Callable[[Running], Running]) -> Shell:
    """A shell whose home is served."""
    started(shell.start("up")).until("stderr", "serving")
    return shell


@pytest.mark.full
def test_a_user_from_the_first_account_to_the_audit_log(served: Shell) -> None:
    assert "ada" in served.run("user", "add", "ada").stdout
    made = served.run("token", "create", "ada", "--out", "ada.token", "--days", "1").stdout
    file = served.folder / "ada.token"
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token.split("_")[1] in made
    assert token not in made
    served.run("group", "add", "vision")
    assert "ada" in served.run("group", "join", "vision", "ada").stdout
    served.run("quota", "set", "--user", "ada", "--priority", "high", "--gpus", "16")
    served.env["FIREFLYER_TOKEN_FILE"] = "ada.token"
    (quota,) = json.loads(served.run("quota", "list", "--json").stdout)
    assert quota == {"user": "ada", "group": "", "priority": "high", "gpus": 16, "nodes": None}
    assert served.run("ps").returncode == 0
    assert "needs a token with scope admin" in served.run("user", "list", code=1).stderr
    (mine,) = json.loads(served.run("token", "list", "--json").stdout)
    assert "token" not in mine
    assert served.run("token", "revoke", mine["id"]).stdout.count("revoked") == 1
    assert "was revoked" in served.run("ps", code=1).stderr
    del served.env["FIREFLYER_TOKEN_FILE"]
    actions = [entry["action"] for entry in json.loads(served.run("audit", "--json").stdout)]
    assert actions == [
        "user.add", "token.create", "group.add", "group.join", "quota.set", "token.revoke",
    ]  # fmt: skip
    assert "quota.set" in served.run("audit").stdout
    assert served.run("quota", "list").stdout.split()[-5:] == ["ada", "each", "high", "16", "-"]
    assert "vision" in served.run("group", "list").stdout
    assert "disabled" in served.run("user", "disable", "ada").stdout
    assert "disabled" not in served.run("user", "enable", "ada").stdout
    assert served.run("group", "leave", "vision", "ada").returncode == 0
    assert served.run("user", "list").stdout.splitlines()[1].split()[0] == "ada"


def test_a_token_is_printed_once_or_written_to_a_new_file(served: Shell) -> None:
    served.run("user", "add", "ada")
    shown = served.run("token", "create", "ada").stdout
    assert shown.startswith("hai_")
    (served.folder / "there").write_text("x")
    assert (
        "exists already: name a new file"
        in served.run("token", "create", "ada", "--out", "there", code=1).stderr
    )
    assert (
        "user 'bob' does not exist"
        in served.run("token", "create", "bob", "--out", "new", code=1).stderr
    )
    assert not (served.folder / "new").exists()
    assert "invalid --scope" in served.run("token", "create", "ada", "--scope", "x", code=1).stderr
    words = served.run("token", "list").stdout.split()
    assert words.count("ada") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "tokens unencrypted over the network"),
        (["--listen", "127.0.0.1:0"], "`fireflyer user add NAME`"),
        (["--tls-cert", "x"], "require --listen"),
        (["--database", "postgresql://a:5ecret@h/d"], "must not contain a password"),
        (["--database", "mysql://h/d"], "expected postgresql://"),
        (["--database-password-file", "x"], "requires --database"),
        (
            ["--database", "postgresql://a@127.0.0.1:1/d"],
            "no connection to postgresql+psycopg://a@",
        ),
    ],
)
def test_options_of_up_that_cannot_work(shell: Shell, options: list[str], message: str) -> None:
    refused = shell.run("up", *options, code=1).stderr
    assert message in refused
    assert "5ecret" not in refused
    assert not shell.client.home.served()


def test_the_file_of_a_token_never_comes_as_an_argument(served: Shell) -> None:
    help = served.run("ps", "--help").stdout + served.run("token", "create", "--help").stdout
    assert "--token" not in help
    assert "FIREFLYER_TOKEN_FILE" in help
    assert os.environ.get("FIREFLYER_TOKEN_FILE") is None
