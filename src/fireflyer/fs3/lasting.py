"""What may be wrong for long: one line of the log when it begins, one when it is over."""

import logging


class Lasting:
    """Of one thing that is looked at again and again, by one thread."""

    def __init__(self, log: "logging.LoggerAdapter[logging.Logger]", over: str) -> None:
        """`over`: the line when it is over."""
        self._log, self._over = log, over
        self.why = ""
        """What is wrong; "" if nothing is."""

    def look(self, why: str) -> None:
        """What is wrong now; a line where that is not what was wrong before."""
        if why == self.why:
            return
        self.why = why
        if why:
            self._log.error("%s", why)
        else:
            self._log.info("%s", self._over)
