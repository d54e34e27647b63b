"""Publishes that are bound to a partition, on their way into its lane and out of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nsq_fast.errors import BadBody, BadMessage, ConfigError, NsqError
from nsq_fast.protocol.retry import Verdict

from .addressed import Addressed, AddressedBatch
from .lane import Lane
from .publish import Publish
from .routes import Route

if TYPE_CHECKING:
    from nsq_fast.runtime.net.connection import Connection

    from .delivery import Delivery


class Pinned:
    """The part of a Delivery that deals with lanes."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def submit(self, publish: Addressed) -> Lane | None:
        """Queue a publish in its place; return the lane to pump, if it is known yet.

        Raises ConfigError when there is no such partition; the publish is over then.
        """
        delivery = self._delivery
        delivery.track(publish)
        try:
            lane = delivery.routes.lane_of(publish)
        except ConfigError as error:
            delivery.finish(publish, error)
            raise
        if lane is not None:
            lane.add(publish)
        else:
            publish.route.undecided.append(publish)
            delivery.seek(publish.route)
        return lane

    def decided(self, route: Route) -> None:
        """It is known now which partitions a topic has."""
        self._delivery.news.set()
        lanes: dict[Lane, None] = {}
        while route.undecided:
            publish = route.undecided.popleft()
            if publish.done:
                continue
            try:
                lane = self._delivery.routes.lane_of(publish)
            except ConfigError as error:
                self._delivery.finish(publish, error)
                continue
            assert lane is not None
            lane.add(publish)
            lanes[lane] = None
        for each in lanes:
            each.pump()

    def refused(self, conn: Connection, command: Addressed | AddressedBatch, lane: Lane, error: NsqError) -> None:
        """The command of a lane failed: those of its publishes that are to be tried again go back to its head."""
        delivery = self._delivery
        if command.done:
            delivery.came_late(conn, command)
        again: list[Addressed] = []
        delay = 0.0
        worst: Verdict | None = None
        for publish in _members(command):
            publish.batch = None
            if publish.done:
                delivery.release(publish)
                continue
            worst = verdict = delivery.judge(publish, error)
            if isinstance(command, AddressedBatch) and isinstance(error, (BadMessage, BadBody)):
                # The server took none, because of one body or because of them all: let the bad one fail alone.
                publish.is_alone = True
                again.append(publish)
            elif verdict.retry:
                again.append(publish)
                delay = max(delay, delivery.delay_of(publish) if verdict.pause else 0.0)
            else:
                delivery.fail(publish, error)
        if worst is not None and worst.refresh:
            delivery.routes.refresh(lane.topic)
        if worst is not None and worst.leader:
            lane.turn_away()
        lane.ended(again, delay)


def _members(command: Addressed | AddressedBatch) -> list[Addressed]:
    if isinstance(command, AddressedBatch):
        return [child for child in command.sent if isinstance(child, Addressed)]  # in a lane all of them are
    return [command]


def waits_in(publish: Publish) -> tuple[deque[Any], ...]:
    """The queues in which a publish may wait."""
    if isinstance(publish, Addressed) and publish.lane is not None:
        return (publish.lane.waiting,)
    return (publish.route.waiting, publish.route.undecided)
