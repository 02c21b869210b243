"""Rehearsal: faults and suspends at given times, and what a script makes of them.

    plan.py      the words of `--rehearse`, and which event is due (pure)
    steps.py     the steps that a script tells in its output (pure)
    report.py    what became of each event, in words (pure)
    injector.py  makes the events: calls of the client, signals to ranks
    slowing.py   stops and continues processes; leaves none stopped
    driver.py    plays a plan on a task

The idea is HAI Platform's `hai-cli python x.py ++ --suspend_seconds 100`. docs/hai-rehearse.md says more.
"""
