"""Old path of `fireflyer.hai.engines.slurm.node`: processes of an earlier release start it."""

import runpy

runpy.run_module("fireflyer.hai.engines.slurm.node", run_name=__name__, alter_sys=True)
