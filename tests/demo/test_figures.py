"""The figures are what the events and the lines say."""

from typing import Any

import pytest

from fireflyer.demo.figures import compute, problems


def test_every_figure_of_a_whole_run(finished: Any) -> None:
    figures = compute(finished.story, orphans=0, val_loss=2.5)
    assert figures is not None
    assert problems(figures, finished.story) == []
    assert figures.steps == 40
    assert figures.attempts == 3
    assert figures.tokens_per_s == pytest.approx(200)
    assert figures.comm_share == pytest.approx(0.1)
    assert figures.loss_start == pytest.approx(5.9)
    assert figures.loss_at_kill == pytest.approx(6 - 10.5 / 10)
    last = [*range(21, 31), *range(31, 41)]
    assert figures.loss_end == pytest.approx(sum(6 - step / 10 for step in last) / 20)
    assert figures.val_loss == 2.5
    assert figures.kill_detected_s == pytest.approx(0.02)
    assert figures.restart_s == pytest.approx(0.02 + 0.4 + 0.5)
    assert figures.steps_lost == 5
    assert figures.lost_s == pytest.approx(0.02 + 0.4 + 5 * 0.5)
    assert figures.suspend_s == pytest.approx(0.30)
    assert figures.resume_s == pytest.approx(0.3 + 0.5)
    assert figures.checkpoint_stall_ms == pytest.approx(4)
    assert figures.checkpoints == 3


def test_the_kill_is_detected_by_the_exit_of_the_killed_rank_alone(script: Any) -> None:
    script.start()
    for _ in range(20):
        script.train()
    script.story.did(script.story.next_action(), script.now)
    script.now += 0.1
    script.exit(0, signal=9)
    script.now += 0.2
    script.exit(1, signal=9)
    figures = compute(script.story, orphans=0)
    assert figures is not None
    assert figures.kill_detected_s == pytest.approx(0.3)
    assert figures.restart_s is None
    assert figures.lost_s is None


def test_no_step_gives_no_figures_and_says_why(script: Any) -> None:
    script.start()
    script.event("failed", reason="rank 1 on n1 exited with status 3")
    assert compute(script.story, orphans=0) is None
    assert problems(None, script.story) == [
        "the task ended as failed: rank 1 on n1 exited with status 3",
        "the task made no optimizer step",
    ]


def test_a_failed_task_is_a_problem_with_its_reason(script: Any) -> None:
    script.start()
    script.train()
    script.event("failed", reason="rank 0 on n0 exited with 1")
    found = problems(compute(script.story, orphans=2), script.story)
    assert found[0] == "the task ended as failed: rank 0 on n0 exited with 1"
    assert "the loss went from 5.90 to 5.90" in found[1]
    assert "no step was seen after the kill" in found[2]
    assert "not suspended and resumed" in found[3]
    assert found[4] == "2 processes were left behind"
