"""Benchmarks of pipelines, tensor and expert parallelism, small, in a lab: their bytes, and their rows."""

import pytest

from fireflyer.bench.parallel import experts, pipeline, tensor
from fireflyer.lab import namespaces


@pytest.mark.full
@pytest.mark.netns
def test_experts() -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")
    spec = experts.Spec(hosts=2, ranks_per_host=1, tokens=32, experts=8, top_k=4, rounds=1)
    sent, wall, *loads = experts.run(spec)
    assert sent.bound is not None
    assert sent.bound <= sent.ours <= 1.1 * sent.bound
    assert wall.peer == "gloo"
    assert [row.missed for row in loads] == [False, False]


@pytest.mark.full
@pytest.mark.netns
def test_tensor() -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")
    rows = tensor.run(tensor.Spec(ranks=(2,), scale=32, tokens=128, rounds=1))
    saved = [row for row in rows if row.unit == "B"]
    assert len(saved) == len(tensor.SHAPES)
    for row in saved:
        assert row.bound is not None
        assert 0.95 * row.bound <= row.ours <= 1.1 * row.bound


@pytest.mark.full
@pytest.mark.netns
def test_pipeline() -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")
    said: list[str] = []
    load = pipeline.Load(pipeline.COMPUTE.name, 0.001, 4 << 10)
    spec = pipeline.Spec(stages=(2,), chunks=2, rounds=1, loads=(load,))
    rows, shown = pipeline.run(spec, said.append)
    assert [row.peer for row in rows[:3]] == ["prediction", "torch on gloo", "prediction"]
    assert all(row.ratio is not None for row in rows)
    *rows, small, large, moe, moe_large = rows
    assert small.case == "planner, llama-13b, 256 GPUs: planned 17.356 s, paper 17.448 s (-0.5%)"
    assert [row.missed for row in (small, large, moe, moe_large)] == [False] * 4
    for sent, card in (rows[-4:-2], rows[-2:]):
        assert sent.ours == sent.peer_value
        assert sent.ours <= card.ours <= 1.25 * sent.ours, "headers of TCP/IP"
    assert len(shown) == len(pipeline.KINDS)
    for drawing in shown:
        planned, measured = drawing.lines["planned"], drawing.lines["measured"]
        assert {s.action for s in planned} == {s.action for s in measured}
    assert len(said) == 3
