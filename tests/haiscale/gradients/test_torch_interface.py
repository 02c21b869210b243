"""Arguments that torch names otherwise."""

import math
from typing import Any

import pytest

from fireflyer.deprecated import argument
from fireflyer.errors import ConfigError
from fireflyer.haiscale.torch_interface import bucket_bytes_of


@pytest.mark.parametrize(
    ("given", "torchs", "expected"),
    [
        (None, {}, 7),
        (3, {}, 3),
        (None, {"bucket_cap_mb": None}, 7),
        (None, {"bucket_cap_mb": 25}, 25 << 20),
        (None, {"bucket_cap_mb": 0.5}, 1 << 19),
    ],
)
def test_bucket_sizes(given: int | None, torchs: dict[str, Any], expected: int) -> None:
    assert bucket_bytes_of(given, torchs, 7) == expected


@pytest.mark.parametrize("mib", [0, -1, True, "25", math.nan, math.inf])
def test_a_cap_that_is_no_size(mib: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        bucket_bytes_of(None, {"bucket_cap_mb": mib}, 7)


def test_two_sizes() -> None:
    with pytest.raises(ConfigError, match="exclude"):
        bucket_bytes_of(1, {"bucket_cap_mb": 1}, 7)


def test_an_old_name_of_an_argument_warns() -> None:
    given = {"doors": "a", "other": 1}
    with pytest.warns(DeprecationWarning, match="members_file="):
        assert argument(given, "doors", "members_file", None) == "a"
    assert argument({"other": 1}, "doors", "members_file", "b") == "b"
