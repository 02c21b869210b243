"""A client in a forked child: every call raises, and nothing of the parent's is touched."""

import os
from collections.abc import Callable

import pytest
from tests.conftest import fork_child
from tests.fs3.client.conftest import Cluster

from fireflyer.fs3.client import Client


def in_child(body: Callable[[], None]) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(body), 0)[1]) == 0


def test_no_call_of_a_forked_child_takes_the_place_of_the_parents(fs: Client) -> None:
    fs.mkdir("/known")

    def child() -> None:
        for call in (
            lambda: fs.open("/of_child", "wb"),
            lambda: fs.mkdir("/of_child"),
            lambda: fs.unlink("/known"),
            lambda: fs.rename("/known", "/z"),
            lambda: fs.stat("/known"),
            lambda: fs.listdir("/"),
            lambda: fs.storage("/s"),
        ):
            with pytest.raises(ValueError, match="connect again in a forked child"):
                call()

    in_child(child)
    with fs.open("/of_parent", "wb") as file:
        file.write(b"bytes")
    in_child(child)
    fs.rename("/of_parent", "/a")
    assert sorted(fs.listdir("/")) == ["a", "known"]
    assert fs.open("/a").readall() == b"bytes"


def test_a_child_that_closes_ends_nothing_of_the_parents(calm: Cluster) -> None:
    with calm.connect() as fs, fs.open("/f", "wb+") as file:
        file.write(b"before ")
        fs.unlink("/f")  # its bytes stay until the session ends

        def child() -> None:
            with fs:
                file.close()

        in_child(child)
        file.write(b"and after")
        file.fsync()
        assert file.pread(100, 0) == b"before and after"
