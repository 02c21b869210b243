"""Logging: `get_logger("hai")` is the logger `fireflyer.hai`. Only programs set handlers.

A record may carry `role` and `node`: the component that logs it (see `speaker`).
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal


def get_logger(part: str) -> logging.Logger:
    """Returns the logger of one part."""
    return logging.getLogger(f"fireflyer.{part}")


def speaker(part: str, role: str, node: str = "") -> "logging.LoggerAdapter[logging.Logger]":
    """Returns the logger of one part for one role of a process."""
    return logging.LoggerAdapter(get_logger(part), {"role": role, "node": node})


def configure(
    level: int = logging.INFO,
    style: Literal["text", "json"] = "text",
    context: Mapping[str, str] | None = None,
) -> None:
    """Sends Fireflyer's log records to stderr; for Fireflyer's programs, not for importers.

    Args:
        style: "json" writes one object a line: time (UTC, ISO 8601), level, logger, message, pid,
            error (a traceback), and the fields of `context` and of the record.
        context: role and node of the process, for records without these fields.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(context or {}) if style == "json" else _Text())
    root = logging.getLogger("fireflyer")
    root.handlers[:] = [handler]
    root.setLevel(level)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s%(origin)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = _role_fields(record)
        record.origin = f" {' '.join(fields.values())}" if fields else ""
        return super().format(record)


class _Json(logging.Formatter):
    def __init__(self, context: Mapping[str, str]) -> None:
        super().__init__()
        self._context = dict(context)

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._context,
            **_role_fields(record),
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _role_fields(record: logging.LogRecord) -> dict[str, str]:
    return {key: value for key in ("role", "node") if (value := getattr(record, key, ""))}
