"""Old path of `fireflyer.hai.forkserver.zygote`: a server of an earlier release starts it."""

import runpy

runpy.run_module("fireflyer.hai.forkserver.zygote", run_name=__name__, alter_sys=True)
