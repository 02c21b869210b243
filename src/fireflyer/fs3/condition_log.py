"""Log of a lasting fault: one line when the fault begins, one when it ends."""

import logging


class ConditionLog:
    """State of a fault that one thread checks periodically."""

    def __init__(self, log: "logging.LoggerAdapter[logging.Logger]", over: str) -> None:
        """Makes the log; `over` is the line that reports the end of a fault."""
        self._log, self._over = log, over
        self.why = ""
        """Current fault; "" if there is none."""

    def update(self, why: str) -> None:
        """Records the current fault; logs a line if it differs from the previous fault."""
        if why == self.why:
            return
        self.why = why
        if why:
            self._log.error("%s", why)
        else:
            self._log.info("%s", self._over)
