"""The publish of a caller that waits for it, and does nothing else: sent at once where nothing else is under way.

What the server waits for comes first; the rest is done while it works. Nothing
switches to another greenlet between sending and expecting the reply. Where it
cannot be sent like this it goes the way of all publishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast import _codec

from .addressed import Addressed
from .publish import Publish

if TYPE_CHECKING:
    from nsq_fast.runtime.net.connection import Connection

    from .delivery import Delivery
    from .lane import Lane
    from .routes import Route


class Prompt:
    """Sends for a Delivery. There is room for what comes here; it says nothing but its body."""

    __slots__ = ("_delivery", "_pending", "_room", "_wakeups")

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._pending = delivery.pending
        self._room = delivery.room
        self._wakeups = delivery.wakeups

    def plain(self, route: Route, topic: str, body: bytes, deadline: float) -> Publish:
        """Publish to a topic without partitions."""
        self._room.used += 1
        data = _codec.pub(topic, body)
        link = None if route.waiting or self._wakeups.is_waking else route.choose()
        conn = None if link is None else link.conn
        if conn is None or not conn.send_if_idle(data):
            publish = Publish(route, topic, "PUB", data, deadline)
            self._delivery.submit(publish)
            return publish
        publish = Publish(route, topic, "PUB", data, deadline)
        conn.session.expect("PUB", publish)
        publish.conn = conn
        publish.attempts = 1
        self._delivery.track(publish)
        return publish

    def anywhere(self, route: Route, topic: str, body: bytes, deadline: float) -> Publish:
        """Publish to a topic that has partitions, or of which that is unknown: to any of them."""
        self._room.used += 1
        is_first = not (self._pending or route.waiting or self._wakeups.is_waking)
        lane = route.choose_lane() if is_first else None
        conn = None if lane is None else self._ask(lane, topic, body)
        publish = Addressed(route, topic, body, deadline)
        if lane is None or conn is None:
            self._delivery.submit(publish)
        else:
            self._expect(publish, conn, lane)
        return publish

    def pinned(self, lane: Lane, body: bytes, deadline: float) -> Addressed | None:
        """Publish what is bound to a lane which is idle, and where nothing waits. None: nothing was done."""
        if self._pending or self._wakeups.is_waking:
            return None
        conn = self._ask(lane, lane.topic, body)
        if conn is None:
            return None
        self._room.used += 1
        publish = lane.on_wire = Addressed(lane.route, lane.topic, body, deadline)
        publish.lane = lane
        publish.pin = lane.partition
        self._expect(publish, conn, lane)
        return publish

    def _ask(self, lane: Lane, topic: str, body: bytes) -> Connection | None:
        """Send to the leader of a partition; None: that was not possible."""
        link = lane.choose()
        conn = None if link is None else link.conn
        if conn is None or not conn.session.dialect.has_partitions:
            return None
        return conn if conn.send_if_idle(_codec.pub(topic, body, lane.partition)) else None

    def _expect(self, publish: Addressed, conn: Connection, lane: Lane) -> None:
        conn.session.expect("PUB", publish)
        publish.conn = conn
        publish.attempts = 1
        publish.partition = lane.partition
        self._delivery.track(publish)
