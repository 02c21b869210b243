"""The short storm of kills, with its state in PostgreSQL."""

from pathlib import Path

from tests.hai.soak.soak import Pace, soak
from tests.hai.soak.test_soak import BLOWS, must_be_whole

from fireflyer.hai.database.connection import PostgreSQL


def test_kills_on_postgresql(tmp_path: Path, postgresql: PostgreSQL) -> None:
    must_be_whole(soak(0.0, 5, tmp_path, Pace(every_s=0.7, blows=BLOWS), postgresql))
