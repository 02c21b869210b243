"""Old path of `fireflyer.hai.hfai_names`: processes of an earlier release import it."""

from fireflyer.hai.hfai_names import *  # noqa: F403
