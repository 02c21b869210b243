"""What the demo does to its task, and when."""

from typing import Any

from fireflyer.demo.story import Kill, Resume, Suspend


def test_kills_the_last_rank_at_half_of_the_training_and_only_once(script: Any) -> None:
    script.start()
    for _ in range(19):
        script.train()
        assert script.story.next_action() is None
    script.train()
    action = script.story.next_action()
    assert action == Kill(1, 101)
    script.story.did(action, script.now)
    script.train()
    assert script.story.next_action() is None


def test_a_single_rank_is_the_victim_itself(script: Any) -> None:
    script.start(world=1)
    for _ in range(20):
        script.train()
    assert script.story.next_action() == Kill(0, 100)


def test_does_not_kill_a_rank_of_an_attempt_that_has_not_stepped(script: Any) -> None:
    script.start()
    for step in range(20):
        script.train(save=step == 18)
    script.exit(1, signal=9)
    script.start()
    assert script.story.next_action() is None
    script.train()
    assert script.story.next_action() == Kill(1, 201)


def test_a_line_that_was_on_its_way_when_the_kill_was_sent_is_no_recovery(script: Any) -> None:
    script.start()
    for _ in range(20):
        script.train()
    script.story.did(script.story.next_action(), script.now)
    for _ in range(20):
        script.train()
    assert script.story.phase == "killed"
    assert script.story.next_action() is None


def test_the_whole_course(finished: Any) -> None:
    story = finished.story
    assert [type(done.action) for done in story.completed] == [Kill, Suspend, Resume]
    assert [done.attempt for done in story.completed] == [1, 2, 2]
    assert (story.phase, story.state) == ("over", "finished")
    assert story.next_action() is None


def test_an_end_before_the_suspend_is_an_end(script: Any) -> None:
    script.start()
    script.train()
    script.event("failed", reason="rank 0 on n0 exited with 1")
    assert (script.story.phase, script.story.state) == ("over", "failed")
    assert script.story.next_action() is None


def test_a_resume_waits_for_the_suspend_that_was_asked_for(script: Any) -> None:
    script.start()
    script.train()
    script.event("suspended")
    assert script.story.next_action() is None
