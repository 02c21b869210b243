"""Sessions and codes: how long they are taken, and what ends them."""

from pathlib import Path

import pytest

from fireflyer.hai.dashboard import sessions
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.connection import Database
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.model.identity import HOME_TOKEN, Identity, TokenRequest

OWNER = Identity(user="owner", token=HOME_TOKEN, scope="admin")


def anywhere(_token: str) -> bool:
    return True


class Harness:
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
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_a_session_is_its_users_until_it_is_ended(harness: Harness) -> None:
    secret, other = harness.sessions.begin(harness.ada), harness.sessions.begin(OWNER)
    found = harness.sessions.find(secret)
    assert found is not None
    assert found.who == harness.ada
    theirs = harness.sessions.find(other)
    assert theirs is not None
    assert (theirs.who, theirs.csrf == found.csrf) == (OWNER, False)
    for wrong in ("", secret[:-1], secret + "A", found.csrf):
        assert harness.sessions.find(wrong) is None
    harness.sessions.end(secret)
    assert harness.sessions.find(secret) is None
    assert harness.sessions.holds(other)


def test_revoking_the_token_ends_it(harness: Harness) -> None:
    secret = harness.sessions.begin(harness.ada)
    harness.accounts.revoke_token(harness.ada.token, OWNER)
    assert not harness.sessions.holds(secret)
    assert harness.sessions.find(secret) is None


def test_disabling_the_user_ends_it_for_good(harness: Harness) -> None:
    secret = harness.sessions.begin(harness.ada)
    harness.accounts.disable_user("ada", disabled=True)
    assert harness.sessions.find(secret) is None
    harness.accounts.disable_user("ada", disabled=False)
    assert harness.sessions.find(secret) is None


def test_the_tokens_expiry_ends_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = harness.sessions.begin(harness.ada)
    (view,) = harness.accounts.tokens("ada")
    assert view.expires is not None
    later = view.expires
    monkeypatch.setattr("fireflyer.hai.http.access.time.time", lambda: later)
    assert not harness.sessions.holds(secret)


def test_it_ends_when_nobody_looks_and_after_a_week_anyway(harness: Harness) -> None:
    idle, used = harness.sessions.begin(OWNER), harness.sessions.begin(OWNER)
    begun = harness.now
    while harness.now - begun + sessions.IDLE_S / 2 <= sessions.LONGEST_S:
        harness.now += sessions.IDLE_S / 2
        assert harness.sessions.find(used) is not None
    assert harness.sessions.find(idle) is None
    harness.now += sessions.IDLE_S / 2
    assert harness.sessions.find(used) is None


def test_asking_whether_it_holds_does_not_make_it_last(harness: Harness) -> None:
    secret = harness.sessions.begin(OWNER)
    for _ in range(3):
        harness.now += sessions.IDLE_S * 0.4
        held = harness.sessions.holds(secret)
    assert not held


def test_a_code_is_taken_once_within_a_minute(harness: Harness) -> None:
    first, late = harness.sessions.code(harness.ada), harness.sessions.code(harness.ada)
    assert harness.sessions.redeem(first, anywhere) == harness.ada
    assert harness.sessions.redeem(first, anywhere) is None
    harness.now += sessions.CODE_S
    assert harness.sessions.redeem(late, anywhere) is None
    assert harness.sessions.redeem("", anywhere) is None


def test_a_listener_that_may_not_take_a_code_does_not_use_it_up(harness: Harness) -> None:
    code = harness.sessions.code(OWNER)
    assert harness.sessions.redeem(code, lambda token: token != HOME_TOKEN) is None
    assert harness.sessions.redeem(code, anywhere) == OWNER
    assert harness.sessions.redeem(code, anywhere) is None


def test_a_code_of_a_revoked_token_is_none(harness: Harness) -> None:
    code = harness.sessions.code(harness.ada)
    harness.accounts.revoke_token(harness.ada.token, OWNER)
    assert harness.sessions.redeem(code, anywhere) is None


def test_one_token_cannot_fill_the_memory(harness: Harness) -> None:
    kept = harness.sessions.begin(OWNER)
    mine = [harness.sessions.begin(harness.ada) for _ in range(sessions.SESSIONS_PER_TOKEN + 5)]
    assert [harness.sessions.holds(secret) for secret in mine].count(True) == (
        sessions.SESSIONS_PER_TOKEN
    )
    assert not harness.sessions.holds(mine[4])
    assert harness.sessions.holds(mine[5])
    assert harness.sessions.holds(kept)
    codes = [harness.sessions.code(harness.ada) for _ in range(sessions.CODES_PER_TOKEN + 2)]
    assert [harness.sessions.redeem(code, anywhere) is not None for code in codes] == (
        [False] * 2 + [True] * sessions.CODES_PER_TOKEN
    )
