"""What becomes of a message that has failed once too often: give-up policies.

A policy is called as ``policy(consumer, message)`` in place of the handler
when a message's attempts exceed ``max_tries``. When it returns, the message is
finished; when it raises, the message is requeued and the policy is tried again
at the next delivery, so nothing is lost because a disk or a topic was not
there. Any callable will do; these are the usual ones. A policy with a
``close()`` method has it called when the consumer is closed.

A message larger than ``max_frame_size`` comes without its body, as a
TruncatedMessage: ``message.is_truncated`` tells. The policies that keep the body
raise MessageTooLarge for it, so that it stays with nsqd.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._lazy import get_logger
from nsq_fast.config import Config
from nsq_fast.errors import ConfigError, MessageTooLarge, counted, seconds
from nsq_fast.log_events import MESSAGE_GIVEN_UP, MESSAGE_OUTDATED
from nsq_fast.names import check_topic
from nsq_fast.protocol.dialect import RESERVED_PREFIX, TAG_KEY
from nsq_fast.protocol.publishing import CODEC_HEADER, IDEMPOTENCE_HEADER, SIZE_HEADER

from .workers import check_handler, refuse_deferred

logger: logging.Logger = get_logger(__name__)

# What a connection says of its subscription, which a producer has none of.
OF_SUBSCRIPTIONS = {"sample_rate", "msg_timeout", "desired_tag", "extend_support", "ext_filter"}

QUIET = 60.0
"""Seconds after which what comes again is told as something new."""

if TYPE_CHECKING:
    from .consumer import AnyConsumer

GiveUpPolicy = Callable[[Any, Message], object]


class Discard:
    """Log one line and drop the message.

    Args:
        callback: called as ``callback(consumer, message)`` first; the message is kept if it raises.
    """

    def __init__(self, callback: GiveUpPolicy | None = None) -> None:
        check_handler("callback", callback)
        self._callback = callback

    def __call__(self, consumer: AnyConsumer, message: Message) -> None:
        if self._callback is not None:
            refuse_deferred(self._callback(consumer, message))
        logger.warning(
            "giving up message %s of %s/%s after %s%s",
            message_name(message), topic_of(consumer, message), consumer.channel,
            counted(message.attempts - 1, "attempt"), _note_on_body(message), extra=MESSAGE_GIVEN_UP,
        )  # fmt: skip


class LogMessage:
    """Log the message with its body, then drop it.

    Args:
        log: where to; default: the logger of this module.
        level: level of the record.
    """

    def __init__(self, log: logging.Logger | None = None, level: int = logging.ERROR) -> None:
        self._log = log if log is not None else logger
        self._level = level

    def __call__(self, consumer: AnyConsumer, message: Message) -> None:
        self._log.log(
            self._level,
            "given up: message %s of %s/%s after %s%s: %r",
            message_name(message), topic_of(consumer, message), consumer.channel,
            counted(message.attempts - 1, "attempt"), _note_on_body(message), message.body, extra=MESSAGE_GIVEN_UP,
        )  # fmt: skip


class WriteToFolder:
    """Write each message given up to two files: ``<topic>.<channel>.<id>.body`` and ``.json`` with its other fields.

    The body is on disk (fsync) before the message is finished. A message that
    is given up twice overwrites its own files. Raises ConfigError where the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(f"folder={folder!r}: must be a path")
        import json  # here, not while messages are given up; most consumers have another policy
        from pathlib import Path

        self._encode = json.dumps
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder={str(folder)!r}: cannot be made: {error}") from error

    def __call__(self, consumer: AnyConsumer, message: Message) -> object:
        _check_body(message)
        topic = topic_of(consumer, message)
        base = f"{topic}.{consumer.channel}.{message_name(message)}"
        about = {
            "topic": topic,
            "channel": consumer.channel,
            "id": message.id.hex(),
            "timestamp": message.timestamp,
            "attempts": message.attempts,
        }
        # A disk may be slow: others run on meanwhile.
        return consumer.apart(self._write, base, message.body, self._encode(about).encode())

    def _write(self, base: str, body: bytes, about: bytes) -> None:
        for suffix, data in ((".body", body), (".json", about)):
            part = self._folder / f"{base}{suffix}.part"
            try:
                with part.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:  # a disk that is full has no room for halves
                part.unlink(missing_ok=True)
                raise
            part.replace(self._folder / f"{base}{suffix}")


class PublishTo:
    """Publish the message to a dead-letter topic, or again to the end of its own; finish it only then.

    At the end of its own topic a message stays in its partition, and keeps its trace id, headers and tag, but no
    idempotence key. It begins with one attempt again, and does so for ever unless something else ends it.

    Args:
        topic: where to; None: the topic it came from.
        producer: what to publish with, on the loop of the consumer; None: a Producer with the consumer's own addresses,
            TLS, secret and other options of connections, made when first needed.
        convert: ``convert(message) -> bytes`` makes the body; default: the body as it is.
    """

    def __init__(
        self,
        topic: str | None = None,
        *,
        producer: Any = None,
        convert: Callable[[Message], bytes] | None = None,
    ) -> None:
        if producer is not None and not callable(getattr(producer, "publish", None)):
            raise ConfigError(f"producer={producer!r}: must have a publish(topic, body) method")
        self.topic: str | None = None if topic is None else check_topic(topic)
        self._producer = producer
        self._own: Any = None
        self._convert = convert

    def __call__(self, consumer: AnyConsumer, message: Message) -> object:
        _check_body(message)
        body = message.body if self._convert is None else self._convert(message)
        producer = self._producer if self._producer is not None else self._own_producer(consumer)
        topic = topic_of(consumer, message)
        if self.topic is None or self.topic == topic:
            return producer.publish(topic, body, **place_of(message))
        return producer.publish(self.topic, body)

    def _own_producer(self, consumer: AnyConsumer) -> Any:
        if self._own is None:
            options = {**_values(consumer.connection_config), **_values(consumer.lookup_config)}
            self._own = consumer.dead_letters(options)
        return self._own

    def close(self) -> object:
        """Close the producer that was made here, if one was."""
        own, self._own = self._own, None
        return None if own is None else own.close()


AGE_POLICIES = FINISH, GIVE_UP = "finish", "give_up"
AgePolicy = str | GiveUpPolicy


def check_policy(name: str, policy: Any, words: tuple[str, ...], check: Callable[[str, Any], None]) -> Any:
    """Return ``policy``; raise ConfigError unless it is one of ``words``, or a give-up policy that ``check`` takes."""
    if callable(policy):
        check(name, policy)
    elif policy not in words:
        raise ConfigError(f"{name}={policy!r}: must be {', '.join(map(repr, words))} or a give-up policy")
    return policy


def tell_outdated(consumer: AnyConsumer, message: Message) -> None:
    """Log that a message is older than ``max_age``."""
    count = consumer.outdated + 1
    if is_worth_a_line(count):
        consumer.logger.warning(
            "message %s of %s/%s is %s old, max_age=%g; it is number %d",
            message_name(message), topic_of(consumer, message), consumer.channel,
            seconds(time() - 1e-9 * message.timestamp), consumer.config.max_age, count, extra=MESSAGE_OUTDATED,
        )  # fmt: skip


def is_worth_a_line(count: int) -> bool:
    """Of what may come a million times the first, second, fourth... is logged: no disk fills in a night."""
    return count > 0 and count & (count - 1) == 0


class Recurring:
    """Counts what may come each second for hours; what has not come for a minute is new again."""

    def __init__(self) -> None:
        self._seen: dict[object, tuple[int, float]] = {}

    def is_worth_a_line(self, kind: object) -> bool:
        """Whether this one of its kind is to be logged: the first, second, fourth..."""
        count, at = self._seen.get(kind, (0, 0.0))
        now = monotonic()
        count = 1 if now - at > QUIET else count + 1
        self._seen[kind] = count, now
        return is_worth_a_line(count)


def topic_of(consumer: AnyConsumer, message: Message) -> str:
    """Where a message came from: one that was made by hand does not say it."""
    return message.topic or consumer.topic


def _note_on_body(message: Message) -> str:
    """What a log record adds about a body that was not received."""
    if not isinstance(message, TruncatedMessage):
        return ""
    return f" without its body of {message.body_size} bytes, above max_frame_size={message.max_frame_size}"


def _check_body(message: Message) -> None:
    """Raise MessageTooLarge for a message whose body was not received: it must not be lost by being finished."""
    if isinstance(message, TruncatedMessage):
        raise MessageTooLarge(message.id, message.attempts, message.body_size, message.max_frame_size)


def place_of(message: Message) -> dict[str, Any]:
    """Keyword arguments of ``publish`` that put a message where it was, as it was; none for the original NSQ."""
    if message.partition is None:
        return {}
    place: dict[str, Any] = {"partition": message.partition}
    if message.trace_id:
        place["trace_id"] = message.trace_id
    if message.ext is not None:
        headers = dict(message.headers)
        headers.pop(IDEMPOTENCE_HEADER, None)  # with it, what is published now would be a copy of this one
        tag = headers.get(TAG_KEY)
        if tag is not None:
            place["tag"] = tag
        if str(headers.get(SIZE_HEADER)) == str(len(message.body)):  # it is decompressed
            headers = {name: value for name, value in headers.items() if name not in (CODEC_HEADER, SIZE_HEADER)}
        place["headers"] = {name: value for name, value in headers.items() if not name.startswith(RESERVED_PREFIX)}
    return place


def _values(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.OPTIONS if name not in OF_SUBSCRIPTIONS}


def message_name(message: Message) -> str:
    """The id in letters that suit a log line and a file name: as it is where it is plain hex, in hex otherwise."""
    text = message.id.decode("ascii", "replace")
    return text if text.isalnum() and text.isascii() else message.id.hex()
