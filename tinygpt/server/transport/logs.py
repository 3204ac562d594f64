"""How the server's log is written: a line each, as text for people or as JSON for programs."""

import json
import logging
import sys
import time


def configure_logging(form: str) -> None:
    """Write what tinygpt.server, uvicorn and asyncio log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name, level in (("tinygpt.server", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers, log.level, log.propagate = [handler], level, False


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00Z INFO request id=... status=200"""

    converter = time.gmtime

    def __init__(self):
        super().__init__("{asctime} {levelname} {message}", "%Y-%m-%dT%H:%M:%SZ", style="{")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        told = (f"{name}={_unbroken(value)}" for name, value in fields.items() if value is not None)
        return " ".join([super().formatMessage(record), *told])


def _unbroken(value: object) -> str:
    """A value that cannot look like another field, or like another line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields | getattr(record, "fields", {}))
