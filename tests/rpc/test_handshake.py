"""Proof of the secret and agreement on a version: who may talk, and what the others learn."""

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rpc.conftest import KEY, SECRET

from fireflyer.errors import ConfigError, ProtocolMismatch
from fireflyer.rpc.handshake import HELLO_BYTES, REFUSAL, Handshake
from fireflyer.rpc.proof import PROOF_BYTES, Secret, prove, proven


def talk(client: Handshake, server: Handshake) -> None:
    """Carries bytes between the two until both are done."""
    to_server = client.opening
    while to_server:
        to_client = server.feed(to_server)
        to_server = client.feed(to_client) if to_client else b""


def test_both_prove_and_know_the_other() -> None:
    client, server = Handshake("client", SECRET, 4), Handshake("server", SECRET, 1)
    talk(client, server)
    assert client.done
    assert server.done
    assert (client.peer_role, server.peer_role) == (1, 4)


@given(sizes=st.lists(st.integers(1, 30), min_size=1), tail=st.binary(max_size=20))
def test_any_cut_of_the_stream_will_do(sizes: list[int], tail: bytes) -> None:
    nonce = bytes(range(32))
    client = Handshake("client", SECRET, 4, nonce=nonce)
    server = Handshake("server", SECRET, 1, nonce=nonce[::-1])
    proof = client.feed(Handshake("server", SECRET, 1, nonce=nonce[::-1]).feed(client.opening))
    stream, turn = client.opening + proof + tail, 0
    while not server.done:
        size = sizes[turn % len(sizes)]
        server.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert server.rest + stream == tail


@pytest.mark.parametrize("other", [Secret(), Secret(b"another-secret-of-the-tests")])
def test_another_secret_is_refused_and_the_server_shows_no_proof(other: Secret) -> None:
    client, server = Handshake("client", other, 4), Handshake("server", SECRET, 1)
    proof = client.feed(server.feed(client.opening))
    with pytest.raises(ProtocolMismatch, match="another secret"):
        server.feed(proof)
    assert server.refusal() == REFUSAL
    with pytest.raises(ProtocolMismatch, match="another secret" if other else "no secret was"):
        client.feed(server.refusal())


def test_a_client_finds_out_a_server_that_only_pretends() -> None:
    client, server = Handshake("client", SECRET, 4), Handshake("server", SECRET, 1)
    proof = client.feed(server.feed(client.opening))
    with pytest.raises(ProtocolMismatch, match="another secret"):
        client.feed(proof)  # what it sent, sent back


def test_a_recorded_handshake_is_worth_nothing() -> None:
    client, server = Handshake("client", SECRET, 4), Handshake("server", SECRET, 1)
    opening = client.opening
    proof = client.feed(server.feed(opening))
    server.feed(proof)
    assert server.done
    again = Handshake("server", SECRET, 1)
    again.feed(opening)
    with pytest.raises(ProtocolMismatch):
        again.feed(proof)


@pytest.mark.parametrize("version", [0x0300, 0x0100])
def test_another_major_version_is_named_on_both_sides(version: int) -> None:
    client, server = Handshake("client", SECRET, 4, version=version), Handshake("server", SECRET, 1)
    with pytest.raises(ProtocolMismatch, match=rf"version 2\.0 .*other {version >> 8}\.0"):
        server.feed(client.opening)
    with pytest.raises(ProtocolMismatch, match=rf"version {version >> 8}\.0 .*other 2\.0"):
        client.feed(server.refusal())


def test_minor_versions_talk() -> None:
    client = Handshake("client", SECRET, 4, version=0x0103)
    server = Handshake("server", SECRET, 1, version=0x0101)
    talk(client, server)
    assert server.done
    assert server.peer_version == 0x0103


def test_the_layout_of_a_hello() -> None:
    nonce = bytes(range(32))
    assert Handshake("client", SECRET, 4, nonce=nonce).opening == b"FFS3\x00\x02\x04\x00" + nonce
    assert HELLO_BYTES == 40
    assert PROOF_BYTES == 32


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_refused_with_the_first_byte_that_cannot_be(data: bytes) -> None:
    server = Handshake("server", SECRET, 1)
    if b"FFS3".startswith(data[:4]) or data.startswith(b"FFS3"):
        return
    with pytest.raises(ProtocolMismatch, match="does not speak"):
        server.feed(data)
    assert server.refusal() == b""


def test_proofs_cover_every_part() -> None:
    good = prove(b"key", b"role", b"one", b"two")
    assert proven(good, b"key", b"role", b"one", b"two")
    for key, parts in ((b"kez", (b"role", b"one", b"two")), (b"key", (b"role", b"two", b"one"))):
        assert not proven(good, key, *parts)
    assert not proven(good[:-1], b"key", b"role", b"one", b"two")


def test_a_secret_is_not_shown() -> None:
    for shown in (repr(SECRET), str(SECRET), f"{SECRET}"):
        assert shown == "Secret(...)"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(SECRET)
    assert not vars(Handshake("client", SECRET, 4)).get("_key")


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    read = Secret.from_file(path)
    assert read.prove(b"x") == SECRET.prove(b"x")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Secret.from_file(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="at least 16") as short:
        Secret.from_file(path)
    assert "short" not in str(short.value).replace("too short", "")
    path.write_bytes(b" \n")
    with pytest.raises(ConfigError, match="empty"):
        Secret.from_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Secret.from_file(tmp_path / "missing")


def test_a_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SECRET_OF_TEST", KEY.decode())
    assert Secret.from_environment("SECRET_OF_TEST").prove(b"x") == SECRET.prove(b"x")
    monkeypatch.delitem(os.environ, "SECRET_OF_TEST")
    assert not Secret.from_environment("SECRET_OF_TEST")
