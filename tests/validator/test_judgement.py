"""Judgement of fleets: figures over seeds, and properties of the criterion."""

import numpy as np
import pytest
from tests.draws import drawn, full
from tests.validator.fleets import Samples, f1, fleet

from fireflyer.validator.judgement import CheckJudgement, judge


def named(judged: CheckJudgement) -> set[str]:
    return {node.node for node in judged.nodes if node.defective}


def figures(seeds: list[int], **kind: object) -> dict[str, float]:
    """Mean F1 of our criterion and of the two plain rules."""
    scores: dict[str, list[float]] = {"ours": [], "fixed": [], "zscore": []}
    for seed in seeds:
        samples, bad = fleet(seed, **kind)  # type: ignore[arg-type]
        judged = judge("gemm", samples, "more")
        scores["ours"].append(f1(named(judged), bad))
        for rule in ("fixed", "zscore"):
            scores[rule].append(f1({n.node for n in judged.nodes if getattr(n, rule)}, bad))
    return {rule: float(np.mean(found)) for rule, found in scores.items()}


SEEDS = list(range(100)) if full() else [0, 1, 2]


def test_nodes_that_lost_5_to_10_percent_are_named() -> None:
    found = figures(SEEDS)
    assert found["ours"] >= 0.95, found
    assert found["ours"] >= max(found["fixed"], found["zscore"]) - 0.02, found


@pytest.mark.full
def test_nodes_that_lost_3_to_10_percent_are_named() -> None:
    found = figures(SEEDS, least=0.03)
    assert found["ours"] >= 0.85, found
    assert found["ours"] >= max(found["fixed"], found["zscore"]) - 0.02, found


def test_faults_that_come_and_go_are_named() -> None:
    found = figures(SEEDS, intermittent=True)
    assert found["ours"] >= 0.85, found
    assert found["fixed"] < 0.3, found


@pytest.mark.full
@pytest.mark.parametrize("nodes", [3, 4, 8, 50, 200])
def test_healthy_fleets_have_few_false_alarms(nodes: int) -> None:
    alarms = sum(
        len(named(judge("gemm", fleet(seed, nodes=nodes, share=0)[0], "more")))
        for seed in range(50)
    )
    assert alarms <= max(2, 0.005 * 50 * nodes), alarms


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_nodes_have_no_criterion(count: int) -> None:
    judged = judge("gemm", {f"n{at}": [1.0, 50.0] for at in range(count)}, "more")
    assert judged.criterion is None
    assert "no criterion below 3 nodes" in judged.reason
    assert not named(judged)


def test_a_criterion_of_zero_is_said() -> None:
    judged = judge("errors", {f"n{at}": [0.0] for at in range(5)}, "less")
    assert (judged.criterion, "0" in judged.reason) == (None, True)


def test_less_is_better_mirrors_more() -> None:
    samples, _ = fleet(3, nodes=40)
    mirrored = {node: [-value for value in values] for node, values in samples.items()}
    more, less = judge("a", samples, "more"), judge("a", mirrored, "less")
    assert named(more) == named(less) != set()
    assert more.criterion is not None
    assert less.criterion is not None
    assert more.criterion == pytest.approx(-less.criterion)
    assert [n.similarity for n in more.nodes] == pytest.approx([n.similarity for n in less.nodes])


def test_units_and_order_of_nodes_change_nothing() -> None:
    samples, _ = fleet(4, nodes=60)
    names = list(samples)
    drawn("order of nodes").shuffle(names)
    other = judge("a", {name: [7e9 * v for v in samples[name]] for name in names}, "more")
    first = judge("a", samples, "more")
    assert named(other) == named(first)
    mine = {n.node: n.similarity for n in first.nodes}
    assert {n.node: n.similarity for n in other.nodes} == pytest.approx(mine)


def test_better_nodes_are_not_named() -> None:
    """The criterion is one-sided: a node that is faster than the fleet is no defect."""
    samples, _ = fleet(5, nodes=30, share=0)
    samples["n0"] = [1.3 * value for value in samples["n0"]]
    judged = judge("a", samples, "more")
    assert named(judged) == set()
    assert next(n for n in judged.nodes if n.node == "n0").similarity == pytest.approx(1, abs=0.01)


def test_equal_nodes_and_one_slower() -> None:
    """Scatter of 0: a loss above the least one is named, a loss below it is not."""
    equal: Samples = {f"n{at}": [10.0] * 5 for at in range(9)}
    assert named(judge("a", equal | {"bad": [9.5] * 5}, "more")) == {"bad"}
    assert named(judge("a", equal | {"bad": [9.95] * 5}, "more")) == set()


def test_a_third_of_the_fleet_may_be_bad() -> None:
    samples, bad = fleet(6, nodes=60, share=0.33, least=0.15, most=0.2, scatter=0.003, noise=0.005)
    assert f1(named(judge("a", samples, "more")), bad) >= 0.95


def test_nodes_with_different_numbers_of_measurements() -> None:
    samples, bad = fleet(7, nodes=50, least=0.09)
    uneven = {node: values[: 11 + at % 9] for at, (node, values) in enumerate(samples.items())}
    judged = judge("a", uneven, "more")
    assert bad <= named(judged)
    assert {n.samples for n in judged.nodes} == set(range(11, 20))
