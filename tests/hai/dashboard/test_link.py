"""`fireflyer dashboard`: the link on standard output, or opened so that no process list has it."""

import stat
from pathlib import Path

import pytest
from tests.hai.dashboard.conftest import Visitor
from tests.hai.server.conftest import Server

from fireflyer.cli.app import run_line
from fireflyer.errors import PeerLost


def test_the_link_is_printed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.start()
    assert run_line(["dashboard", "--home", str(server.home)]) == 0
    printed = capsys.readouterr().out
    root = f"http://127.0.0.1:{server.client.server().port}/dashboard/sign-in#code="
    assert printed.startswith(root)
    assert Visitor(server).sign_in(printed.removeprefix(root).strip()).status == 303


def test_it_is_opened_by_a_file_that_only_its_owner_reads(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    opened: list[str] = []

    def open_it(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", open_it)
    assert run_line(["dashboard", "--open", "--home", str(server.home)]) == 0
    assert capsys.readouterr().out == ""
    file = server.home / "dashboard.html"
    assert opened == [file.as_uri()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    code = file.read_text().partition("#code=")[2].partition('"')[0]
    assert code not in opened[0]
    assert Visitor(server).sign_in(code).status == 303


def test_where_no_browser_is_it_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    monkeypatch.setattr("webbrowser.open", lambda _address: False)
    assert run_line(["dashboard", "--open", "--home", str(server.home)]) == 1
    assert "no browser can be opened here" in capsys.readouterr().err


def test_without_a_server_there_is_no_link(tmp_path: Path) -> None:
    from fireflyer.cli.dashboard import impl

    with pytest.raises(PeerLost, match="start one with `fireflyer up`"):
        impl.show(tmp_path, open_browser=False, json=False)
