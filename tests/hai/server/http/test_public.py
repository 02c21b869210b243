"""Served beyond loopback: only with users, only with TLS or a proxy in front, and how a client gets there."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hai.server.conftest import Server
from tests.ports import take_ports
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError, PeerLost, Unauthenticated
from fireflyer.hai.client import Client
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.identity import TokenRequest
from fireflyer.hai.server.listeners import Public, parse_public

MakeSpec = Callable[..., TaskSpec]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=here",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"


def public(**fields: Any) -> dict[str, Any]:
    return msgspec.to_builtins(Public(host="127.0.0.1", **fields))  # type: ignore[no-any-return]


def token_file(server: Server, folder: Path, name: str = "ada") -> Path:
    admin = Administration(server.client)
    admin.add_user(name)
    made = admin.create_token(TokenRequest(user=name))
    file = folder / f"{name}.token"
    file.write_text(made.token)
    file.chmod(0o600)
    return file


def test_without_a_users_token_nothing_is_served_beyond_loopback(server: Server) -> None:
    said = public(port=take_ports(1)[0])
    with server.starting(public=said) as ready:
        assert ready.read() == b""
    assert server.wait() == 1
    assert "`fireflyer user add NAME` and `fireflyer token create NAME`" in server.output()


def test_a_user_elsewhere_by_tls(
    server: Server,
    certificate: tuple[Path, Path],
    tmp_path: Path,
    spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.start()
    file = token_file(server, tmp_path)
    server.client.shutdown()
    port = take_ports(1)[0]
    cert, key = map(str, certificate)
    server.start(public=public(port=port, certificate=cert, key=key))
    monkeypatch.setenv("FIREFLYER_SERVER", f"https://127.0.0.1:{port}")
    monkeypatch.setenv("FIREFLYER_TOKEN_FILE", str(file))
    with pytest.raises(PeerLost, match="FIREFLYER_CA_FILE"):
        Client().tasks()
    monkeypatch.setenv("FIREFLYER_CA_FILE", cert)
    client = Client.connect()
    assert client.submit(spec("finish")).user == "ada"
    assert client.wait("t1", {"finished"}, LIMIT_S).id == "t1"
    assert Client(server.home).task("t1").user == "ada"  # a home that is named is asked itself
    home_token = tmp_path / "home.token"
    home_token.write_bytes(server.client.home.token.read_bytes())
    home_token.chmod(0o600)
    monkeypatch.setenv("FIREFLYER_TOKEN_FILE", str(home_token))
    with pytest.raises(Unauthenticated):  # the home's own token is for loopback alone
        Client().tasks()
    server.kill()
    with pytest.raises(PeerLost, match=f"https://127.0.0.1:{port} cannot be reached"):
        Client().tasks()


@pytest.mark.parametrize(
    ("text", "certificate", "key", "behind_proxy", "message"),
    [
        ("0.0.0.0:8443", "", "", False, "tokens unencrypted over the network"),
        ("[::]:8443", "", "", False, "tokens unencrypted over the network"),
        ("10.0.0.5", "", "", True, "expected ADDR:PORT"),
        ("host:80", "", "", True, "expected ADDR:PORT"),
        ("10.0.0.5:x", "", "", True, "expected ADDR:PORT"),
        ("10.0.0.5:1", "c", "", False, "require each other"),
        ("10.0.0.5:1", "c", "k", True, "omit --tls-cert"),
        ("10.0.0.5:1", "/nowhere/c", "/nowhere/k", False, "--tls-cert /nowhere/c: no such file"),
    ],
)
def test_listening_that_is_refused(
    text: str, certificate: str, key: str, behind_proxy: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_public(text, certificate, key, behind_proxy=behind_proxy)


def test_listening_that_is_not() -> None:
    assert parse_public("10.0.0.5:80", "", "", behind_proxy=True) == Public(
        host="10.0.0.5", port=80, behind_proxy=True
    )
    assert parse_public("[::1]:80", "", "", behind_proxy=False) == Public(host="::1", port=80)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.org", "unencrypted over the network"),
        ("http://10.0.0.5:80", "unencrypted over the network"),
        ("ftp://127.0.0.1", "expected https://HOST:PORT"),
        ("127.0.0.1:80", "expected https://HOST:PORT"),
        ("https://127.0.0.1:x", "expected https://HOST:PORT"),
        ("https://h/path", "expected https://HOST:PORT"),
        ("https://ada:pw@h", "must not contain a user or password"),
    ],
)
def test_a_server_that_no_client_goes_to(
    url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("x")
    file.chmod(0o600)
    monkeypatch.setenv("FIREFLYER_SERVER", url)
    monkeypatch.setenv("FIREFLYER_TOKEN_FILE", str(file))
    with pytest.raises(ConfigError, match=message):
        Client()


def test_a_token_file_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_SERVER", "https://127.0.0.1:1")
    with pytest.raises(ConfigError, match="needs FIREFLYER_TOKEN_FILE"):
        Client()
    file = tmp_path / "token"
    monkeypatch.setenv("FIREFLYER_TOKEN_FILE", str(file))
    with pytest.raises(ConfigError, match="No such file"):
        Client()
    file.write_text("x")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600 it"):
        Client()
