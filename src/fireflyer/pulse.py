"""Old path of `fireflyer.heartbeat`: fork servers of an earlier release import it."""

from fireflyer.heartbeat import *  # noqa: F403
