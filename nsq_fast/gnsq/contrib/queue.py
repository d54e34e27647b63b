"""Handlers that hand messages to a program that iterates over them and responds to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gevent.queue import Channel, Queue

from nsq_fast._codec import Message

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
