"""The scheduler's promises over random histories; `make cluster-histories` runs many more."""

from collections import Counter

from tests.hai.plan.histories import History


def test_the_promises_hold_over_random_histories() -> None:
    total: Counter[str] = Counter()
    for seed in range(400):
        total += History(seed).run()
    for what in ("Launch", "Preempt", "fault", "drain", "suspend", "quota", "ended", "impossible"):
        assert total[what] > 0, f"no history had a {what}"
