"""Old path of `fireflyer.hai.rank_lease`: processes of an earlier release import it."""

from fireflyer.hai.rank_lease import *  # noqa: F403
