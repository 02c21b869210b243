"""Nodes that are really slowed down, one among eight: named, by the right check.

Slowed disks need a quiet machine: `python -m tests.validator.slow_nodes --kind disk --slow 8`.
"""

from collections.abc import Iterator

import pytest
from tests.validator import slow_nodes
from tests.validator.control_groups import Missing
from tests.validator.slow_nodes import Disks, Lines, Processors, rightly

pytestmark = [pytest.mark.full, pytest.mark.deadline(300)]


@pytest.fixture(scope="module", params=["line", "cpu"])
def fleet(request: pytest.FixtureRequest) -> Iterator[tuple[str, Lines | Processors | Disks]]:
    """Kind of the nodes, and the nodes."""
    try:
        with slow_nodes.nodes(request.param) as made:
            yield request.param, made
    except Missing as missing:
        pytest.skip(f"not run: {missing}")


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slowed_node_is_named(fleet: tuple[str, Lines | Processors | Disks], slow: int) -> None:
    kind, nodes = fleet
    named = nodes.round(slow)
    assert rightly(kind, slow, named), named
