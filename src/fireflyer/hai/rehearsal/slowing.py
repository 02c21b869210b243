"""Old path of `fireflyer.hai.rehearsal.slowdown`: processes of an earlier release start it."""

import runpy

runpy.run_module("fireflyer.hai.rehearsal.slowdown", run_name=__name__, alter_sys=True)
