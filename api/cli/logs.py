"""Log lines on stderr, for people or as JSON, with the request they belong to."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

# Loggers of this distribution; everybody else's information is noise unless it is a warning.
PACKAGES = ("api", "engine", "offload")


class TextFormatter(logging.Formatter):
    """`14:02:11 INFO    engine.core [request-id]: message`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s%(where)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        record.where = f" [{request_id}]" if request_id else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message; request_id, exception and
    fields (the message's figures by name) where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id:
            entry["request_id"] = request_id
        fields = getattr(record, "fields", None)
        if fields:
            entry["fields"] = fields
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str, log_format: str) -> None:
    """Sends all log records of the process to stderr; `level` and `log_format` as the flags."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    threshold = getattr(logging, level.upper())
    root.setLevel(max(threshold, logging.WARNING))
    for package in PACKAGES:
        logging.getLogger(package).setLevel(threshold)
    logging.captureWarnings(True)
