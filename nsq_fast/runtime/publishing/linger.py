"""Gathering: single publishes to one topic leave together, as one MPUB.

With ``linger`` they wait for each other: one alarm serves all topics, it rings
``linger`` seconds after the first publish came, and everything that gathered
leaves. Without, what was published in one turn of the hub leaves at its end:
nothing waits, and a hundred greenlets that were woken together cost the server
one command instead of a hundred (``nsq-fast bench publish``). In both cases a
topic's batch leaves earlier when it is full, by count or by bytes.

Publishes that are bound to a partition gather in its lane; here only its turn
to leave is kept. Those that may go to any partition leave as one batch to one
of them, and the next batch goes to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from gevent import get_hub

from nsq_fast.config import ProducerConfig
from nsq_fast.runtime.supervised import FAULTS

from .addressed import Addressed
from .alarm import Alarm
from .delivery import Delivery
from .lane import Lane
from .publish import Publish

# Bytes of an MPUB body before the messages, and before each message.
_MPUB_HEADER = 4
_LENGTH = 4


class _Gathering:
    """What waits of one topic."""

    __slots__ = ("bodies", "children", "size")

    def __init__(self) -> None:
        self.children: list[Publish] = []
        self.bodies: list[bytes] = []
        self.size = _MPUB_HEADER


class Linger:
    """Gathers the publishes of a producer by topic."""

    def __init__(self, delivery: Delivery, config: ProducerConfig) -> None:
        self._delivery = delivery
        self._track = delivery.track
        self._wait = config.linger
        self._max_messages = config.linger_max_messages
        self._max_bytes = min(config.linger_max_bytes, config.max_body_size)
        self._max_body_size = config.max_body_size
        self._gatherings: dict[str, _Gathering] = {}
        self._lanes: dict[Lane, None] = {}
        self._submit = delivery.submit_batch
        self._alarm = Alarm(self.flush, delivery.supervisor)
        self._hub = get_hub()

    def add(self, publish: Publish, body: bytes, overhead: int = 0) -> None:
        """Let a publish wait; ``body`` is what it will send, with ``overhead`` bytes more."""
        self._track(publish)
        topic = publish.topic
        gathering = self._gatherings.get(topic)
        size = _LENGTH + len(body) + overhead
        if gathering is None or gathering.size + size > self._max_body_size:
            gathering = self._begin(topic)
        children = gathering.children
        children.append(publish)
        gathering.bodies.append(body)
        gathering.size = size = gathering.size + size
        if size >= self._max_bytes or len(children) >= self._max_messages:
            self._send(topic)

    def _begin(self, topic: str) -> _Gathering:
        """A new batch of a topic, after what there is of it."""
        if topic in self._gatherings:
            self._send(topic)
        gathering = self._gatherings[topic] = _Gathering()
        if len(self._gatherings) == 1 and not self._lanes:
            self._schedule()
        return gathering

    def add_addressed(self, publish: Addressed) -> None:
        """Let a publish wait that says more than its body. From now on nobody relies on all saying the same."""
        self._submit = self._delivery.submit_run
        self.add(publish, publish.body, publish.saying.overhead)

    def hold(self, lane: Lane) -> None:
        """Let what is in a lane wait."""
        if not self._lanes and not self._gatherings:
            self._schedule()
        self._lanes[lane] = None

    def is_full(self, lane: Lane) -> bool:
        """Whether a lane needs not wait for more: by count only, which is known without looking."""
        return len(lane.waiting) >= self._max_messages

    def _schedule(self) -> None:
        if self._wait:
            self._alarm.set(monotonic() + self._wait)
        else:
            self._hub.loop.run_callback(self.flush)

    def flush_topic(self, topic: str) -> None:
        """Send what gathered of a topic now: something else follows that must not overtake it."""
        if topic in self._gatherings:
            self._send(topic)

    def flush(self) -> None:
        """Send everything now."""
        self._alarm.stop()
        lanes, self._lanes = self._lanes, {}
        for topic in list(self._gatherings):
            self._supervised(self._send, topic)
        for lane in lanes:
            self._supervised(lane.pump)

    def _supervised(self, send: Callable[..., None], *args: str) -> None:
        """Send; what fails is left to its deadline, and keeps nothing else from leaving."""
        try:
            send(*args)
        except FAULTS as fault:
            self._delivery.supervisor.report("sending what gathered", fault, "the rest is sent")

    def forget(self) -> None:
        """Send nothing of what gathered."""
        self._alarm.stop()
        self._gatherings.clear()
        self._lanes.clear()

    def _send(self, topic: str) -> None:
        gathering = self._gatherings.pop(topic)
        if not self._gatherings and not self._lanes:
            self._alarm.stop()
        self._submit(gathering.children, gathering.bodies)
