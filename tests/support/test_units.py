"""Sizes as people write them."""

import pytest

from fireflyer.units import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("64K", 65536),
        ("16m", 1 << 24),
        ("1GiB", 1 << 30),
        ("16mib", 1 << 24),
        ("7 B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1X", "K", "1.5G", "9" * 5000, "1 GB", "\u0663"])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected e\.g\. 64K") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 150
