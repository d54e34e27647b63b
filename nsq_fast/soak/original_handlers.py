"""What the handlers of the original dialect do: most return at once, some do all that a handler may do."""

from __future__ import annotations

from collections.abc import Sequence

from gevent import sleep, spawn_later

from nsq_fast import Message
from nsq_fast.errors import RequeueMessage
from nsq_fast.runtime import Consumer

from .consumers import Consumers
from .servers import MSG_TIMEOUT

_ROUND = 2000
"""Of so many messages, those in ``_ACTIONS`` get something else than a handler that returns at once."""


class OriginalHandlers:
    """The handlers, which keep account with ``consumers``."""

    def __init__(self, consumers: Consumers) -> None:
        self._consumers = consumers
        self._done_once: set[int | None] = set()

    def handle_plainly(self, consumer: Consumer, message: Message) -> None:
        """Finish each message at once."""
        self._consumers.finish(consumer, self._consumers.number(message))

    def handle_batch(self, consumer: Consumer, messages: Sequence[Message]) -> None:
        """Finish each message of a batch, but those that the link has changed."""
        for message in messages:
            self._consumers.finish_or_requeue(consumer, message)

    def handle(self, consumer: Consumer, message: Message) -> None:
        """Do with a message what its number says, the first time; finish it otherwise."""
        number = self._consumers.number(message)
        special = None if number is None else _ACTIONS.get(number % _ROUND)
        if special is not None and number not in self._done_once:
            self._done_once.add(number)
            special(self, message)
            if message.is_async():
                return
        self._consumers.finish(consumer, number)

    def _fail(self, _message: Message) -> None:
        raise ValueError("a handler that fails, the first time")

    def _requeue(self, _message: Message) -> None:
        raise RequeueMessage(0.2, backoff=False)

    def _touch(self, message: Message) -> None:
        sleep(MSG_TIMEOUT * 0.6)
        message.touch()
        sleep(MSG_TIMEOUT * 0.6)

    def _finish_later(self, message: Message) -> None:
        message.enable_async()
        number = self._consumers.number(message)

        def finish() -> None:
            if message.responder is not None and message.responder.is_open and not message.has_responded():
                self._consumers.mark_finished("handlers", number)
                message.finish()

        spawn_later(0.3, finish)

    def _never_answer(self, message: Message) -> None:
        message.enable_async()

    def _take_too_long(self, _message: Message) -> None:
        sleep(MSG_TIMEOUT * 1.2)

    def _sleep(self, _message: Message) -> None:
        sleep(0.4)


_ACTIONS = {
    3: OriginalHandlers._fail,
    **dict.fromkeys((33, 533, 1033, 1533), OriginalHandlers._requeue),
    **dict.fromkeys((43, 1043), OriginalHandlers._touch),
    **dict.fromkeys(range(63, 2000, 100), OriginalHandlers._finish_later),
    **dict.fromkeys((83, 583, 1083, 1583), OriginalHandlers._never_answer),
    **dict.fromkeys((103, 1103), OriginalHandlers._take_too_long),
    **dict.fromkeys(range(123, 2000, 100), OriginalHandlers._sleep),
}
