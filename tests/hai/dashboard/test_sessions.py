"""Sessions and codes: how long they are taken, and what ends them."""

from pathlib import Path

import pytest

from fireflyer.hai.dashboard import sessions
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.connection import Database
from fireflyer.hai.identity import HOME_TOKEN, Identity, TokenRequest
from fireflyer.hai.server.access import Accounts

OWNER = Identity(user="owner", token=HOME_TOKEN, scope="admin")


def anywhere(_token: str) -> bool:
    return True


class Desk:
    """Accounts with one user, a token of his, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(folder / "hai.sqlite")
        self.accounts = Accounts(self.database)
        self.accounts.add_user("ada")
        made = self.accounts.create_token(TokenRequest(user="ada", scope="submit"), OWNER)
        self.ada = self.accounts.identify(made.token, "")
        self.now = 1000.0
        self.sessions = Sessions(self.accounts, lambda: self.now)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_session_is_its_users_until_it_is_ended(desk: Desk) -> None:
    secret, other = desk.sessions.begin(desk.ada), desk.sessions.begin(OWNER)
    found = desk.sessions.find(secret)
    assert found is not None
    assert found.who == desk.ada
    theirs = desk.sessions.find(other)
    assert theirs is not None
    assert (theirs.who, theirs.csrf == found.csrf) == (OWNER, False)
    for wrong in ("", secret[:-1], secret + "A", found.csrf):
        assert desk.sessions.find(wrong) is None
    desk.sessions.end(secret)
    assert desk.sessions.find(secret) is None
    assert desk.sessions.holds(other)


def test_revoking_the_token_ends_it(desk: Desk) -> None:
    secret = desk.sessions.begin(desk.ada)
    desk.accounts.revoke_token(desk.ada.token, OWNER)
    assert not desk.sessions.holds(secret)
    assert desk.sessions.find(secret) is None


def test_disabling_the_user_ends_it_for_good(desk: Desk) -> None:
    secret = desk.sessions.begin(desk.ada)
    desk.accounts.disable_user("ada", disabled=True)
    assert desk.sessions.find(secret) is None
    desk.accounts.disable_user("ada", disabled=False)
    assert desk.sessions.find(secret) is None


def test_the_tokens_expiry_ends_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = desk.sessions.begin(desk.ada)
    (view,) = desk.accounts.tokens("ada")
    assert view.expires is not None
    later = view.expires
    monkeypatch.setattr("fireflyer.hai.server.access.time.time", lambda: later)
    assert not desk.sessions.holds(secret)


def test_it_ends_when_nobody_looks_and_after_a_week_anyway(desk: Desk) -> None:
    idle, used = desk.sessions.begin(OWNER), desk.sessions.begin(OWNER)
    begun = desk.now
    while desk.now - begun + sessions.IDLE_S / 2 <= sessions.LONGEST_S:
        desk.now += sessions.IDLE_S / 2
        assert desk.sessions.find(used) is not None
    assert desk.sessions.find(idle) is None
    desk.now += sessions.IDLE_S / 2
    assert desk.sessions.find(used) is None


def test_asking_whether_it_holds_does_not_make_it_last(desk: Desk) -> None:
    secret = desk.sessions.begin(OWNER)
    for _ in range(3):
        desk.now += sessions.IDLE_S * 0.4
        held = desk.sessions.holds(secret)
    assert not held


def test_a_code_is_taken_once_within_a_minute(desk: Desk) -> None:
    first, late = desk.sessions.code(desk.ada), desk.sessions.code(desk.ada)
    assert desk.sessions.redeem(first, anywhere) == desk.ada
    assert desk.sessions.redeem(first, anywhere) is None
    desk.now += sessions.CODE_S
    assert desk.sessions.redeem(late, anywhere) is None
    assert desk.sessions.redeem("", anywhere) is None


def test_a_door_that_may_not_take_a_code_does_not_use_it_up(desk: Desk) -> None:
    code = desk.sessions.code(OWNER)
    assert desk.sessions.redeem(code, lambda token: token != HOME_TOKEN) is None
    assert desk.sessions.redeem(code, anywhere) == OWNER
    assert desk.sessions.redeem(code, anywhere) is None


def test_a_code_of_a_revoked_token_is_none(desk: Desk) -> None:
    code = desk.sessions.code(desk.ada)
    desk.accounts.revoke_token(desk.ada.token, OWNER)
    assert desk.sessions.redeem(code, anywhere) is None


def test_one_token_cannot_fill_the_memory(desk: Desk) -> None:
    kept = desk.sessions.begin(OWNER)
    mine = [desk.sessions.begin(desk.ada) for _ in range(sessions.SESSIONS_PER_TOKEN + 5)]
    assert [desk.sessions.holds(secret) for secret in mine].count(True) == (
        sessions.SESSIONS_PER_TOKEN
    )
    assert not desk.sessions.holds(mine[4])
    assert desk.sessions.holds(mine[5])
    assert desk.sessions.holds(kept)
    codes = [desk.sessions.code(desk.ada) for _ in range(sessions.CODES_PER_TOKEN + 2)]
    assert [desk.sessions.redeem(code, anywhere) is not None for code in codes] == (
        [False] * 2 + [True] * sessions.CODES_PER_TOKEN
    )
