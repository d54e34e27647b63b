"""Handlers for common needs: gnsq's ``contrib.batch``, ``contrib.queue``, ``contrib.giveup`` and ``contrib.sentry``."""

from __future__ import annotations

import base64
import importlib
import io
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gevent import spawn as gevent_spawn
from gevent.pool import Pool
from gevent.queue import Channel, Empty, Queue

from nsq_fast._codec import Message
from nsq_fast.errors import NSQException
from nsq_fast.log_events import HANDLER_FAILED, RESPONSE_FAILED

from .httpclient import NsqdHTTPClient

if TYPE_CHECKING:
    _Queue = Queue[Any]
    _Channel = Channel[Any]
else:  # not subscriptable when it runs
    _Queue = Queue
    _Channel = Channel


class QueueHandler(_Queue):
    """A gevent queue of messages: connect it to ``on_message``, iterate over it, respond to each message.

    Args:
        maxsize: messages that it holds; None: no limit but ``max_in_flight``.
    """

    def __call__(self, consumer: Any, message: Message) -> None:
        message.enable_async()
        self.put(message)


class ChannelHandler(_Channel):
    """A QueueHandler that holds nothing: putting a message waits until somebody takes it."""

    def __call__(self, consumer: Any, message: Message) -> None:
        message.enable_async()
        self.put(message)


TIMEOUT_WARNING = "batching timed out. batch size may be too large"
STARVED_WARNING = "consumer is starved. batch size may be too large"

_END = object()


class BatchHandler:
    """Gather messages, handle them together, respond to each. New programs pass ``batch_handler`` to
    ``nsq_fast.Consumer``, which takes the messages that are there and waits for no more.

    Connect it to ``on_message`` of a consumer with a ``max_in_flight`` above the batch size.

    A batch ends when it is full; earlier, with a RuntimeWarning, when the consumer gets no more messages without
    a response to some, or none came for ``timeout`` seconds.

    Args:
        batch_size: messages of a full batch.
        handle_batch: called with the results of ``handle_message``. When it raises, all messages are requeued.
        handle_message: called with each message; what it returns is its part of the batch. When it raises, the
            message is requeued and left out.
        handle_batch_error: called with (error, messages, batch) when ``handle_batch`` raised.
        handle_message_error: called with (error, message) when ``handle_message`` raised.
        spawn: runs a batch: a callable, or the number of batches that may run at once.

    Each of the four may be overridden in a subclass instead.
    """

    def __init__(
        self,
        batch_size: int,
        handle_batch: Callable[[list[Any]], object] | None = None,
        handle_message: Callable[[Message], object] | None = None,
        handle_batch_error: Callable[[Exception, list[Message], list[Any]], object] | None = None,
        handle_message_error: Callable[[Exception, Message], object] | None = None,
        timeout: float = 10,
        spawn: Callable[..., object] | int = gevent_spawn,
    ) -> None:
        self.logger: logging.Logger = logging.getLogger(__name__)
        self.batch_size = batch_size
        self.timeout = timeout
        self.spawn: Callable[..., object] = Pool(spawn).spawn if isinstance(spawn, int) else spawn
        self.message_channel: Any = Channel()
        given = {
            "handle_batch": handle_batch,
            "handle_message": handle_message,
            "handle_batch_error": handle_batch_error,
            "handle_message_error": handle_message_error,
        }
        vars(self).update({name: handler for name, handler in given.items() if handler is not None})
        self.worker: Any = gevent_spawn(self._run)

    def __call__(self, consumer: Any, message: Message) -> None:
        message.enable_async()
        self.message_channel.put(message)
        if consumer.is_starved:
            self.message_channel.put(_END)

    def _run(self) -> None:
        while True:
            messages = self._gather()
            if messages:
                self.spawn(self.run_batch, messages)

    def _gather(self) -> list[Message]:
        messages: list[Message] = []
        while len(messages) < self.batch_size:
            try:
                # Without a message there is no batch, and nothing to time.
                message = self.message_channel.get(timeout=self.timeout if messages else None)
            except Empty:
                warnings.warn(TIMEOUT_WARNING, RuntimeWarning, stacklevel=2)
                break
            if message is _END:
                if messages:
                    warnings.warn(STARVED_WARNING, RuntimeWarning, stacklevel=2)
                break
            messages.append(message)
        return messages

    def run_batch(self, messages: list[Message]) -> None:
        """Handle messages as one batch, and respond to them."""
        batch = self._parts(messages)
        if batch:
            try:
                self.handle_batch(batch)
            except Exception as error:
                self.logger.exception("caught exception while handling batch", extra=HANDLER_FAILED)
                self._tell(self.handle_batch_error, error, messages, batch)
                self.requeue_messages(messages)
                return
        self.finish_messages(messages)

    def _parts(self, messages: list[Message]) -> list[Any]:
        batch = []
        for message in messages:
            try:
                batch.append(self.handle_message(message))
            except Exception as error:  # noqa: PERF203
                self.logger.exception("caught exception while handling message", extra=HANDLER_FAILED)
                self._tell(self.handle_message_error, error, message)
                self.requeue_message(message)
        return batch

    def _tell(self, handler: Callable[..., object], *args: Any) -> None:
        try:
            handler(*args)
        except Exception:  # the messages need a response all the same
            self.logger.exception("caught exception while handling an error", extra=HANDLER_FAILED)

    # Responses

    def finish_message(self, message: Message) -> None:
        """Finish a message unless it is responded to."""
        self._answer(message, message.finish, "finishing")

    def finish_messages(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.finish_message(message)

    def requeue_message(self, message: Message) -> None:
        """Requeue a message unless it has a response."""
        self._answer(message, message.requeue, "requeueing")

    def requeue_messages(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.requeue_message(message)

    def _answer(self, message: Message, answer: Callable[[], object], doing: str) -> None:
        if message.has_responded():
            return
        try:
            answer()
        except NSQException as error:
            self.logger.warning("error %s message (%r)", doing, error, extra=RESPONSE_FAILED)

    # Given as arguments, or overridden

    def handle_message(self, message: Message) -> Any:
        """Turn a message into its part of the batch."""
        return message

    def handle_batch(self, messages: list[Any]) -> object:
        raise RuntimeError("handle_batch must be given, or overridden")

    def handle_message_error(self, error: Exception, message: Message) -> object:
        """Called when a message could not be handled."""
        return None

    def handle_batch_error(self, error: Exception, messages: list[Message], batch: list[Any]) -> object:
        """Called when a batch could not be handled."""
        return None


# For ``on_giving_up``. When such a handler raises, the message is kept: it is requeued, and given up again when it is
# delivered again.


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


class SentryExceptionHandler:
    """Reports to Sentry what handlers raise. Connect it to ``on_exception``.

    Args:
        client: None, or the ``sentry_sdk`` module: reports with it (ImportError when it is not installed). A client
            of raven, which came before it, works as well: anything with ``captureException``.
    """

    def __init__(self, client: Any = None) -> None:
        self.client: Any = importlib.import_module("sentry_sdk") if client is None else client

    def message_extra(self, message: Message) -> dict[str, Any]:
        """What is reported of a message. Override it to keep the body to yourself."""
        return {
            "id": message.id.decode("ascii", "backslashreplace"),
            "timestamp": message.timestamp,
            "attempts": message.attempts,
            "body": message.body.decode("utf-8", "backslashreplace"),
        }

    def __call__(self, consumer: Any, message: Message | None, error: BaseException) -> None:
        extra = {} if message is None else {"message": self.message_extra(message)}
        if hasattr(self.client, "captureException"):
            exc_info = (type(error), error, error.__traceback__)
            self.client.captureException(exc_info=exc_info, extra=extra)
            return
        with self.client.new_scope() as scope:
            for name, value in extra.items():
                scope.set_context(name, value)
            scope.capture_exception(error)
