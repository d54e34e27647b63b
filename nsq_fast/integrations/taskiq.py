"""A broker of taskiq: tasks are messages of one topic, and each worker takes them through one channel.

    from nsq_fast.integrations.taskiq import NSQBroker

    broker = NSQBroker("127.0.0.1:4150")

    @broker.task
    async def double(number: int) -> int:
        return 2 * number

A task is acknowledged by taskiq, by default when it has run. The message of a
worker that died before that is delivered again when its timeout is over; while a
task runs, its timeout is put off (TOUCH). So tasks run at least once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from nsq_fast import Message
from nsq_fast.aio import Consumer, Producer
from nsq_fast.names import Addresses

from . import delay_ms, respond

try:
    from taskiq import AckableMessage, AsyncBroker, BrokerMessage
except ImportError as _error:
    raise ImportError("nsq_fast.integrations.taskiq needs taskiq: pip install 'nsq-fast[taskiq]'") from _error

DELAY_LABEL = "delay"
MAX_IN_FLIGHT = 100
# A task that has begun often, because its workers died, is a task all the same: taskiq decides what is given up.
CONSUMER_OPTIONS: dict[str, Any] = {"auto_touch": True, "max_tries": 0}


class NSQBroker(AsyncBroker):  # type: ignore[misc]  # taskiq is an extra: type checkers may not have it
    """Kicks tasks by publishing them, and listens by consuming them.

    Args:
        nsqd_tcp_addresses, lookupd_http_addresses: of the servers, as for ``nsq_fast.aio.Producer``.
        topic: of the tasks.
        channel: of the workers, which share the tasks. Another channel gets every task, too.
        max_in_flight: tasks that a worker holds at once; no more run in it, whatever ``--max-async-tasks`` says.
        producer: more options of the producer.
        consumer: more options of the consumer. Unless they say otherwise, tasks are touched, and none is given up.

    The label ``delay`` of a task says how many seconds it waits in nsqd (original servers only).
    """

    def __init__(
        self,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        *,
        topic: str = "taskiq",
        channel: str = "taskiq",
        max_in_flight: int = MAX_IN_FLIGHT,
        producer: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._topic = topic
        servers = nsqd_tcp_addresses, lookupd_http_addresses
        options = {"max_in_flight": max_in_flight, **CONSUMER_OPTIONS, **dict(consumer or {})}
        self._new_producer = partial(Producer, *servers, **dict(producer or {}))
        self._new_consumer = partial(Consumer, topic, channel, *servers, **options)
        self._producer: Producer = self._new_producer()
        self._consumer: Consumer = self._new_consumer()
        self._is_over = False

    async def startup(self) -> None:
        """Connect. A broker that was shut down can be started again."""
        if self._is_over:  # what is closed cannot be started again
            self._is_over = False
            self._producer, self._consumer = self._new_producer(), self._new_consumer()
        await super().startup()
        await self._producer.start()

    async def shutdown(self) -> None:
        """Give back what no task was begun with; wait for what is published; close the connections."""
        self._is_over = True
        await self._consumer.close()
        await self._producer.close()
        await super().shutdown()

    async def kick(self, message: BrokerMessage) -> None:
        """Publish a task. Returns when a server has it; raises what ``Producer.publish`` raises."""
        defer = delay_ms(f"the label {DELAY_LABEL}", message.labels.get(DELAY_LABEL))
        await self._producer.publish(self._topic, message.message, defer)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """The tasks, one by one, until the worker ends."""
        await self._consumer.start()
        try:
            async for message in self._consumer:
                message.enable_async()
                yield AckableMessage(data=message.body, ack=_ack_of(message))
        finally:
            if self._consumer.is_running:
                self._consumer.pause()  # tasks that run are still acknowledged; ``shutdown`` closes it


def _ack_of(message: Message) -> Any:
    async def ack() -> None:
        respond(message.finish)

    return ack
