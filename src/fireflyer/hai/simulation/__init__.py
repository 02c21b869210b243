"""Replays a trace of jobs under the production scheduler: `fireflyer sim`.

    trace = readers.read(Path("jobs.csv"))
    result = measure(replay(with_users(trace, None), Setup(nodes=80, policy="timeshare")))

`docs/operate/hai-sim.md` lists what the simulation models.
"""
