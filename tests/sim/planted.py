"""Faults planted in the client, each of which a scenario must find: what the simulation is worth.

Each is a few lines that replace some of the client, as a slip of the hand would. ``python -m sim planted 0:200`` runs
them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from nsq_fast.client import connection as connection_module
from nsq_fast.client import publishes, routing, sender
from nsq_fast.client.acknowledger import Acknowledger
from nsq_fast.client.connection import Connection
from nsq_fast.client.lookup import LookupPoller, PolledTopic, TopicWatch
from nsq_fast.client.subscription import Subscription
from nsq_fast.client.subscriptions import Flow
from nsq_fast.client.transport import Transport
from nsq_fast.errors import BadMessage, ConnectionLost
from nsq_fast.protocol import rdy
from nsq_fast.protocol.rdy import Sharing
from nsq_fast.protocol.session import Heartbeat

Patch = Callable[[Any, str, Any], None]


class Planted(NamedTuple):
    """A fault, where it is found, how it is planted by ``plant(patch)``, and a seed that has found it before."""

    name: str
    scenario: str
    plant: Callable[[Patch], None]
    seed: int = 0


def _nothing(*_: Any, **__: Any) -> None: ...


def _heartbeat_unanswered(patch: Patch) -> None:
    real = Connection._handle

    def handle(self: Connection, event: Any) -> None:
        if event.__class__ is not Heartbeat:
            real(self, event)

    patch(Connection, "_handle", handle)


def _writer_not_woken(patch: Patch) -> None:
    real = Connection._write_later

    def write_later(self: Connection, unsent: memoryview) -> None:
        real(self, unsent)
        self._writer.pause()  # type: ignore[union-attr]

    patch(Connection, "_write_later", write_later)


def _pending_not_told(patch: Patch) -> None:
    real = Connection._failed

    def failed(self: Connection, token: Any, error: Any) -> None:
        if not isinstance(error, ConnectionLost):
            real(self, token, error)

    patch(Connection, "_failed", failed)


def _unknown_called_unsent(patch: Patch) -> None:
    real = connection_module.lost_error
    patch(connection_module, "lost_error", lambda text, outcome_unknown: real(text, outcome_unknown=False))


def _leftover_lost(patch: Patch) -> None:
    real = Transport.upgrade

    async def upgrade(self: Transport, kind: str, leftover: bytes, deadline: float) -> None:
        await real(self, kind, b"", deadline)

    patch(Transport, "upgrade", upgrade)


def _no_deadline(patch: Patch) -> None:
    real = Transport._wait_for

    async def wait_for(self: Transport, event: str, deadline: float) -> None:
        await real(self, event, deadline + 1000)

    patch(Transport, "_wait_for", wait_for)


def _finished_twice(patch: Patch) -> None:
    real = Connection.finish
    calls = [0]

    def finish(self: Connection, message: Any) -> Any:
        calls[0] += 1
        if calls[0] % 10 == 0:
            self.put_bytes(b"FIN %b\n" % message.id)
        return real(self, message)

    patch(Connection, "finish", finish)


def _end_not_reported(patch: Patch) -> None:
    real = Connection._report

    def report(self: Connection, reason: Any) -> None:
        real(self, reason)
        real(self, reason)

    patch(Connection, "_report", report)


def _half_a_write_lost(patch: Patch) -> None:
    real = Connection._write_later

    def write_later(self: Connection, unsent: memoryview) -> None:
        real(self, unsent[1:] if len(unsent) > 1 else unsent)

    patch(Connection, "_write_later", write_later)


def _goodbye_before_the_rest(patch: Patch) -> None:
    real = Connection.close

    def close(self: Connection, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        if self._is_leaving and self._unsent is not None:
            self._say_goodbye()

    patch(Connection, "close", close)


def _asked_again(patch: Patch) -> None:
    real = publishes.decide

    def decide(error: Any, attempts: int, policy: Any, *rest: Any, **options: Any) -> Any:
        return real(error, attempts, msgspec.structs.replace(policy, retry_unknown_outcome=True), *rest, **options)

    patch(publishes, "decide", decide)


def _bad_message_again(patch: Patch) -> None:
    real = publishes.decide

    def decide(error: Any, attempts: int, *rest: Any, **options: Any) -> Any:
        verdict = real(error, attempts, *rest, **options)
        is_bad = isinstance(error, BadMessage) and attempts < 3
        return msgspec.structs.replace(verdict, retry=True) if is_bad else verdict

    patch(publishes, "decide", decide)


def _never_unknown(patch: Patch) -> None:
    real = publishes.decide

    def decide(*arguments: Any, **options: Any) -> Any:
        return msgspec.structs.replace(real(*arguments, **options), possibly_stored=False)

    patch(publishes, "decide", decide)


def _failed_behind(patch: Patch) -> None:
    def failed(self: Any, command: Any, again: Any, delay: float, *, is_stale: bool) -> None:
        self.in_flight -= 1
        self.on_wire = None
        self.is_idle = not self.is_paused
        self.waiting.extend(again)
        if delay:
            self.pause(delay)
        elif self.waiting:
            self.pump()

    patch(routing.PartitionQueue, "failed", failed)


def _one_too_many(patch: Patch) -> None:
    real = Sharing.changes

    def changes(*arguments: Any) -> Any:
        return [(index, count + 1 if count > 1 else count) for index, count in real(*arguments)]

    patch(Sharing, "changes", changes)


def _raised_before_lowered(patch: Patch) -> None:
    real = rdy.plan

    def plan(shares: Any, wanted: Any, max_in_flight: int, now: float) -> Any:
        as_if_lowered = [
            msgspec.structs.replace(share, rdy=min(share.rdy, want), ceiling=0)
            for share, want in zip(shares, wanted, strict=True)
        ]
        lowers = [(index, want) for index, want in enumerate(wanted) if want < shares[index].rdy]
        raises, waiting = real(as_if_lowered, wanted, max_in_flight, now)
        return raises + lowers, waiting

    patch(rdy, "plan", plan)


def _in_flight_not_counted(patch: Patch) -> None:
    real = Sharing.changes

    def changes(self: Any, shares: Any, *arguments: Any) -> Any:
        for share in shares:
            share.in_flight = 0
        return real(self, shares, *arguments)

    patch(Sharing, "changes", changes)


def _failure_finished(patch: Patch) -> None:
    def failed(self: Any, message: Any, error: BaseException, *arguments: Any) -> None:
        message.finish()

    patch(Acknowledger, "failed", failed)


def _all_are_waited_for(patch: Patch) -> None:
    real = LookupPoller._take

    def take(self: LookupPoller, topic: PolledTopic, asked_at: float) -> None:
        if not topic.open:
            real(self, topic, asked_at)

    patch(LookupPoller, "_take", take)


def _watch_waits(patch: Patch) -> None:
    real = LookupPoller.topics

    async def topics(self: LookupPoller, on_names: Any = None, grace: float | None = None) -> Any:
        return await real(self, on_names, None)

    patch(LookupPoller, "topics", topics)


def _set(target: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch(target, name, value)


PLANTED = (
    Planted("heartbeats are not answered", "connection", _heartbeat_unanswered),
    Planted("silence is not noticed", "connection", _set(Connection, "_watch_silence", _nothing), 3),
    Planted("half an interval is silence", "connection", _set(connection_module, "SILENT_INTERVALS", 0.5)),
    Planted("who waits to write is not woken", "connection", _writer_not_woken, 1),
    Planted("a byte of what did not fit is lost", "connection", _half_a_write_lost, 1),
    Planted("close does not send what is queued", "connection", _set(Connection, "flush", _nothing)),
    Planted("the stream is ended before the rest is sent", "connection", _goodbye_before_the_rest, 45),
    Planted("lost commands are not told of", "connection", _pending_not_told, 3),
    Planted("what may have been stored is called unsent", "connection", _unknown_called_unsent, 28),
    Planted("the end is told twice", "connection", _end_not_reported),
    Planted("timers outlive the connection", "connection", _set(Connection, "_cancel_timers", _nothing)),
    Planted("watches outlive the socket", "connection", _set(Transport, "unwatch", _nothing)),
    Planted("bytes between two layers are lost", "connection", _leftover_lost),
    Planted("what layers hold is not read", "connection", _set(Connection, "_read_on_later", _nothing), 62),
    Planted("connecting has no deadline", "connection", _no_deadline, 17),
    Planted("a message is finished twice", "connection", _finished_twice),
    Planted("an unknown outcome is tried again where that is not allowed", "producer", _asked_again, 28),
    Planted("a refused body is tried again", "producer", _bad_message_again, 25),
    Planted("possibly_stored is never said", "producer", _never_unknown, 28),
    Planted("what failed is sent behind what waits", "producer", _failed_behind, 296),
    Planted("who waits for room is not woken", "producer", _set(publishes.PendingLimit, "_admit", _nothing), 1),
    Planted("deadlines do not ring", "producer", _set(sender.Pending, "_ring", _nothing), 12),
    Planted("a partition stays paused", "producer", _set(routing.PartitionQueue, "resume", _nothing), 40),
    Planted("a lost connection is not made anew", "producer", _set(sender.ProducerConnection, "_begin", _nothing)),
    Planted("tries to connect do not wait for each other", "producer", _set(sender, "TRY_INTERVAL", 0.0), 1),
    Planted("RDY is one more than the share", "consumer", _one_too_many, 1),
    Planted("RDY is raised before others are lowered", "consumer", _raised_before_lowered),
    Planted("what is in flight is not counted", "consumer", _in_flight_not_counted, 16),
    Planted("a failed message is finished", "consumer", _failure_finished, 11),
    Planted("requeues are not sent", "consumer", _set(Connection, "put_requeue", _nothing), 9),
    Planted("what a lost connection had is shared out no more", "consumer", _set(Flow, "remove", _nothing), 2),
    Planted("a close gives nothing back", "consumer", _set(Subscription, "give_back_unstarted", _nothing), 199),
    Planted("what one lookupd says waits for the others", "lookup", _all_are_waited_for, 69),
    Planted("a topic that nobody knows is not sought", "lookup", _set(PolledTopic, "missing", _nothing), 10),
    Planted("what a pattern finds waits for all lookupds", "lookup", _watch_waits, 24),
    Planted("a pattern is looked for without a pause", "lookup", _set(TopicWatch, "_pause", lambda *_: 0.0)),
    Planted("a pattern is not looked for again", "lookup", _set(TopicWatch, "_pause", lambda *_: 3600.0), 1),
)


def _check_takes_the_same(real: Any, value: Any) -> None:
    """A fault that cannot be called as the client calls it would be found by that, and not by a rule."""
    if isinstance(real, type) or not callable(real):
        return
    parameters = inspect.signature(real).parameters.values()
    named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    others = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    inspect.signature(value).bind(*range(others), **dict.fromkeys(named))


@contextmanager
def plant(fault: Planted) -> Iterator[None]:
    """The client has this fault inside."""
    changed: list[tuple[Any, str, Any]] = []

    def patch(target: Any, name: str, value: Any) -> None:
        _check_takes_the_same(getattr(target, name), value)
        own = vars(target).get(name, changed)  # ``changed`` stands for: it is inherited
        changed.append((target, name, own))
        setattr(target, name, value)

    fault.plant(patch)
    try:
        yield
    finally:
        for target, name, own in reversed(changed):
            if own is changed:
                delattr(target, name)
            else:
                setattr(target, name, own)
