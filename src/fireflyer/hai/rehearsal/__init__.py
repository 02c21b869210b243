"""Rehearsal: faults and suspends at given times, and a script's reaction to them.

    plan.py      parser of `--rehearse`, and the choice of the event that is due (pure)
    steps.py     parser of the steps that a script prints (pure)
    report.py    report on each event (pure)
    injector.py  injects the events: calls of the client, signals to ranks
    slowdown.py  stops and continues processes; leaves no process stopped
    driver.py    runs a plan on a task

The idea is HAI Platform's `hai-cli python x.py ++ --suspend_seconds 100`. docs/operate/hai-rehearse.md says
more.
"""
