"""Old path of `fireflyer.checkpoint.memory.keeper`: tasks that began under an earlier release start it."""

import runpy

runpy.run_module("fireflyer.checkpoint.memory.keeper", run_name=__name__, alter_sys=True)
