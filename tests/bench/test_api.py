"""`fireflyer bench api` with few followers: a real server, every row is there."""

from fireflyer.bench.hai import api


def test_followers_and_submissions_are_measured_together() -> None:
    told: list[str] = []
    spec = api.Spec(followers=16, lines=10.0, rates=(20,), seconds=1.0)
    rows = api.run(spec, told.append)
    assert told == ["20 tasks/s: 16 followers"]
    assert [row.case.rpartition(": ")[2] for row in rows] == [
        "submissions", "p99", "p50", "line to follower, p99", "server CPU a submission",
        "server CPU a second",
    ]  # fmt: skip
    values = {row.case.rpartition(": ")[2]: row.ours for row in rows}
    assert 0 < values["p50"] <= values["p99"]
    assert values["server CPU a second"] > 0
    assert values["line to follower, p99"] > 0
