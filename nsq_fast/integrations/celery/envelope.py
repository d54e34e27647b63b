"""What a body of NSQ holds for kombu: a message with its headers and properties, as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from kombu.utils.json import dumps, loads

Payload = dict[str, Any]
"""A message of kombu: ``body``, ``content-type``, ``content-encoding``, ``headers`` and ``properties``."""


def encode(payload: Payload) -> bytes:
    """The body that stands for a message."""
    body: bytes = dumps(payload).encode()
    return body


def decode(body: bytes) -> Payload:
    """The message that ``encode`` was given.

    A body that it has not made becomes a message without headers, of a content type that no worker accepts: Celery
    logs it and drops it, as it does with whatever is no task.
    """
    try:
        payload = loads(body.decode())
    except ValueError:
        payload = None
    if _is_payload(payload):
        found: Payload = payload
        return found
    return {
        "body": body,
        "content-type": "application/octet-stream",
        "content-encoding": "binary",
        "headers": {},
        "properties": {"delivery_info": {}},
    }


def _is_payload(payload: Any) -> bool:
    return (
        isinstance(payload, dict)
        and "body" in payload
        and isinstance(payload.get("headers"), dict)
        and isinstance(payload.get("properties"), dict)
        and isinstance(payload["properties"].get("delivery_info"), dict)
    )


def seconds_to_eta(payload: Payload, now: datetime) -> float:
    """How long it is from ``now``, which has a time zone, until a task may run; 0 if it may."""
    eta: Any = (payload.get("headers") or {}).get("eta")
    try:
        due = datetime.fromisoformat(eta)
    except (TypeError, ValueError):
        return 0.0
    if due.tzinfo is None:  # only the worker knows which zone is meant, and waits itself
        return 0.0
    return max(0.0, (due - now).total_seconds())
