"""Old path of `fireflyer.hai.workspaces.venv_builder`: processes of an earlier release start it."""

import runpy

runpy.run_module("fireflyer.hai.workspaces.venv_builder", run_name=__name__, alter_sys=True)
