"""Old path of `fireflyer.hai.rank.lease`: processes of an earlier release import it."""

from fireflyer.hai.rank.lease import *  # noqa: F403
