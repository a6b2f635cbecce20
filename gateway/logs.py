"""How the gateway logs: lines for people or JSON, with the session and the model call they are about.

No line holds a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

from model_runtime.gateway_config import GatewayConfig

session_id: ContextVar[str] = ContextVar("session_id", default="")
request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_up(config: GatewayConfig) -> None:
    """Log to stderr as the config says. Replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


def _about() -> dict[str, str]:
    about = {"session_id": session_id.get(), "request_id": request_id.get()}
    return {name: value for name, value in about.items() if value}


class TextLines(logging.Formatter):
    """The usual line, and which session and call it is about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s")

    def format(self, record: logging.LogRecord) -> str:
        record.about = "".join(f" {name}={value}" for name, value in _about().items())
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
