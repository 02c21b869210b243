"""Where a job stands in the queue."""

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.hai.scheduling.lanes import Lane, Lanes, QueueKey

SPOTS = st.tuples(
    st.tuples(st.sampled_from([-50, -10]), st.integers(-1, 2)),
    st.tuples(st.sampled_from([(1, 0, 0), (2, 8, 0)]), st.sampled_from([None, ("ada", 10, "")])),
    st.booleans(),
)
"""Rank, lane, and whether it leaves again."""


@given(st.lists(SPOTS, max_size=30))
def test_who_is_ahead_are_those_who_come_before(spots: list[tuple[QueueKey, Lane, bool]]) -> None:
    lanes = Lanes()
    for order, (rank, lane, _) in enumerate(spots):
        lanes.put((order, f"t{order}"), rank, lane)
    for order, (_, _, leaves) in enumerate(spots):
        if leaves:
            lanes.take((order, f"t{order}"))
    queue = lanes.in_order()
    assert [lanes.ahead((int(task[1:]), task)) for task in queue] == list(range(len(queue)))
