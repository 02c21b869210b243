"""Logging: `get_logger("hai")` is the logger `fireflyer.hai`. Only programs
configure handlers."""

import logging
import sys


def get_logger(part: str) -> logging.Logger:
    """The logger of one part."""
    return logging.getLogger(f"fireflyer.{part}")


def configure(level: int = logging.INFO) -> None:
    """Sends Fireflyer's log records to standard error; for programs of ours, not for importers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger("fireflyer")
    root.handlers[:] = [handler]
    root.setLevel(level)
