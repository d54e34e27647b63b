"""Handlers for ``on_giving_up``: write messages to a log, or publish them elsewhere.

When a handler raises, the message is kept: it is requeued, and given up again
when it is delivered again.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nsq_fast._codec import Message
from nsq_fast.gnsq.nsqd import NsqdHTTPClient


class LogGiveupHandler:
    """Write the bodies of messages, one a line.

    Args:
        log: called with each line: ``write`` of a file, text or binary. In text, bytes that are not UTF-8 are escaped.
        newline: what ends a line.
    """

    def __init__(self, log: Callable[[Any], object] = sys.stdout.write, newline: str = "\n") -> None:
        self.log = log
        self.newline = newline

    def format_message(self, message: Message) -> str | bytes:
        """What is written of a message."""
        return message.body

    def __call__(self, consumer: Any, message: Message) -> None:
        line = self.format_message(message)
        if _is_binary(self.log):
            data = line if isinstance(line, bytes) else line.encode()
            self.log(data + self.newline.encode())
        else:
            text = line if isinstance(line, str) else line.decode("utf-8", "backslashreplace")
            self.log(text + self.newline)


class JSONLogGiveupHandler(LogGiveupHandler):
    """Write messages as JSON objects, one a line.

    A body that is not UTF-8 stands in ``body_base64`` in place of ``body``.
    """

    def format_message(self, message: Message) -> str | bytes:
        """The JSON of a message."""
        about: dict[str, Any] = {
            "timestamp": message.timestamp,
            "attempts": message.attempts,
            "id": message.id.decode("ascii", "backslashreplace"),
        }
        try:
            about["body"] = message.body.decode()
        except UnicodeDecodeError:
            about["body_base64"] = base64.b64encode(message.body).decode()
        return json.dumps(about)


class NsqdGiveupHandler:
    """Publish the bodies of messages to another topic, over HTTP.

    Args:
        nsqd_hosts: take turns.
        nsqd_class: makes a client for each.
    """

    def __init__(
        self,
        topic: str,
        nsqd_hosts: Iterable[str] = ("localhost",),
        nsqd_class: Callable[[str], Any] = NsqdHTTPClient,
    ) -> None:
        clients = [nsqd_class(host) for host in nsqd_hosts]
        if not clients:
            raise ValueError("at least one nsqd host is required")
        self.topic = topic
        self.nsqds: Iterator[Any] = itertools.cycle(clients)

    def format_message(self, message: Message) -> bytes:
        """What is published of a message."""
        return message.body

    def __call__(self, consumer: Any, message: Message) -> None:
        next(self.nsqds).publish(self.topic, self.format_message(message))


def _is_binary(write: Callable[[Any], object]) -> bool:
    return isinstance(getattr(write, "__self__", None), (io.RawIOBase, io.BufferedIOBase))
