"""Logs that grow while many follow them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fireflyer.hai.controller import logs
from fireflyer.hai.controller.logs import LogFile, Logs
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    folder = tmp_path / "home" / "tasks" / "t1" / "1"
    folder.mkdir(parents=True)
    return LogFile("t1", 1, folder / "0.log")


def serve(
    tmp_path: Path, writing: Callable[[str, int], bool] = lambda _name, _number: True
) -> Logs:
    return Logs(Home(tmp_path / "home"), Store.__new__(Store), writing)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which files were read."""
    found: list[int] = []
    read = logs._read

    def counting(path: Path, offset: int, most: int) -> tuple[bytes, int]:
        found.append(offset)
        return read(path, offset, most)

    monkeypatch.setattr(logs, "_read", counting)
    return found


Follower = AsyncIterator[tuple[str, int] | None]


async def next_of_all(followers: list[Follower]) -> list[tuple[str, int] | None]:
    return await asyncio.gather(*(anext(one) for one in followers))


async def first_text(follower: Follower) -> tuple[str, int]:
    while (piece := await anext(follower)) is None:
        pass
    return piece


def test_a_line_is_read_once_for_all_who_follow(
    tmp_path: Path, file: LogFile, reads: list[int]
) -> None:
    async def run() -> None:
        served = serve(tmp_path)
        file.path.write_bytes(b"one\n")
        followers: list[Follower] = [served.follow(file, 0) for _ in range(50)]
        assert await next_of_all(followers) == [("one\n", 4)] * 50
        at = 4
        for line in (b"two\n", b"three\n", b"four\n"):
            waiting = asyncio.create_task(next_of_all(followers))
            for _ in range(5):
                await asyncio.sleep(0)  # all of them are at the end now
            del reads[:]
            with file.path.open("ab") as log:
                log.write(line)
            at += len(line)
            assert await waiting == [(line.decode(), at)] * 50
            assert reads == [at - len(line)]
        for one in followers:
            await one.aclose()  # type: ignore[attr-defined]
        assert not served._watch._files, "nobody watches any more"
        assert served._ticking is None
        served.close()

    asyncio.run(run())


def test_followers_far_apart_get_their_own_bytes(
    tmp_path: Path, file: LogFile, reads: list[int]
) -> None:
    async def run() -> None:
        served = serve(tmp_path, lambda _name, _number: False)
        text = "".join(chr(ord("a") + number % 26) for number in range(200))
        file.path.write_text(text)
        places = [0, *range(1, 200, 7), 200]
        followers: list[Follower] = [served.follow(file, at) for at in places]
        for at, one in zip(places, followers, strict=True):
            found = [piece async for piece in one]
            assert found == ([(text[at:], 200)] if at < 200 else [])
        served.close()

    asyncio.run(run())
    assert len(reads) <= 2 * 31


def test_who_has_no_news_is_told_so_with_one_timer_for_all(
    tmp_path: Path, file: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "IDLE_S", 0.01)

    async def run() -> None:
        served = serve(tmp_path)
        followers: list[Follower] = [served.follow(file, 0) for _ in range(20)]
        for _ in range(3):
            assert await next_of_all(followers) == [None] * 20
        assert served._ticks >= 3
        file.path.write_bytes(b"x")
        assert await asyncio.gather(*map(first_text, followers)) == [("x", 1)] * 20
        served.end()
        for one in followers:
            assert [piece async for piece in one if piece is not None] == []
        assert served._ticking is None
        served.close()

    asyncio.run(run())
