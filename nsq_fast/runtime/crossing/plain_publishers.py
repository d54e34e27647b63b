"""What publishes for other threads where there is nothing but a topic and a body, in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gevent._hub_local import get_hub_if_exists

from nsq_fast._plain_publish import TaskPublisher, ThreadPublisher

from .gathering import Gathering
from .publishing import CrossingProducer
from .requests import Callers, PlainRequest


def thread_publisher(producer: CrossingProducer) -> ThreadPublisher:
    """Publishes for threads, each of which waits. In any thread."""
    return ThreadPublisher(producer.queue, WaitingThreads(producer.gathering), producer.abandon, get_hub_if_exists)


def task_publisher(
    producer: CrossingProducer, callers: Callers, loop: Any, running_loop: Callable[[], object]
) -> TaskPublisher:
    """Publishes for the tasks of an event loop. In any thread."""
    return TaskPublisher(producer.queue, callers, loop, running_loop, producer.direct)


class WaitingThreads(Callers):
    """Threads, each of which waits for a Latch."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering

    def taken(self, requests: Sequence[PlainRequest]) -> None:
        self._gathering.waiting.update([request.awaited for request in requests])

    def answer(self, request: PlainRequest) -> None:
        self._gathering.answer(request.awaited)

    def answer_all(self, requests: list[PlainRequest]) -> None:
        self._gathering.answer_all([request.awaited for request in requests])
