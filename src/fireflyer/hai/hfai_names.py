"""Old path of `fireflyer.hai.rank.hfai_names`: processes of an earlier release import it."""

from fireflyer.hai.rank.hfai_names import *  # noqa: F403
