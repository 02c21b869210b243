"""Log of a lasting fault: one line when it begins, one when it is over."""

import logging


class ConditionLog:
    """Fault that is checked again and again, by one thread."""

    def __init__(self, log: "logging.LoggerAdapter[logging.Logger]", over: str) -> None:
        """`over`: the line when the fault is over."""
        self._log, self._over = log, over
        self.why = ""
        """Present fault; "" if there is none."""

    def look(self, why: str) -> None:
        """Takes the present fault; logs a line if it differs from the one before."""
        if why == self.why:
            return
        self.why = why
        if why:
            self._log.error("%s", why)
        else:
            self._log.info("%s", self._over)
