"""Faults planted in the client, each of which a scenario must find: what the simulation is worth.

Each replaces one function of the client, or one number, as a slip of the hand would. ``python -m sim planted 0:200``
runs them all.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


class Planted(NamedTuple):
    """A fault, the scenario that finds it, what stands where in the client, and a seed that has found it before."""

    name: str
    scenario: str
    target: Any
    attribute: str
    value: Any
    seed: int = 0


def nothing(*_: Any, **__: Any) -> None: ...


PLANTED = [
    Planted("silence is not noticed", "connection", Connection, "_watch_silence", nothing, 3),
    Planted("half an interval is silence", "connection", connection_module, "SILENT_INTERVALS", 0.5),
    Planted("close does not send what is queued", "connection", Connection, "flush", nothing),
    Planted("timers outlive the connection", "connection", Connection, "_cancel_timers", nothing),
    Planted("watches outlive the socket", "connection", Transport, "unwatch", nothing),
    Planted("what layers hold is not read", "connection", Connection, "_read_on_later", nothing, 62),
    Planted("who waits for room is not woken", "producer", publishes.PendingLimit, "_admit", nothing, 1),
    Planted("deadlines do not ring", "producer", sender.Pending, "_ring", nothing, 12),
    Planted("a partition stays paused", "producer", routing.PartitionQueue, "resume", nothing, 40),
    Planted("a lost connection is not made anew", "producer", sender.ProducerConnection, "_begin", nothing),
    Planted("tries to connect do not wait for each other", "producer", sender, "TRY_INTERVAL", 0.0, 1),
    Planted("waiting publishes end no pause", "producer", sender.ProducerConnection, "hurry", nothing, 2),
    Planted("requeues are not sent", "consumer", Connection, "put_requeue", nothing, 9),
    Planted("what a lost connection had is shared out no more", "consumer", Flow, "remove", nothing),
    Planted("a close gives nothing back", "consumer", Subscription, "give_back_unstarted", nothing, 125),
    Planted("a topic that nobody knows is not sought", "lookup", PolledTopic, "missing", nothing, 8),
    Planted("a pattern is looked for without a pause", "lookup", TopicWatch, "_pause", lambda *_: 0.0, 3),
    Planted("a pattern is not looked for again", "lookup", TopicWatch, "_pause", lambda *_: 3600.0, 5),
]


def planted(name: str, scenario: str, target: Any, attribute: str, seed: int = 0) -> Callable[[Any], None]:
    """The function below it is called in the place of the real one, with that as its first argument."""
    real = getattr(target, attribute)

    def register(wrong: Callable[..., Any]) -> None:
        def called(*arguments: Any, **options: Any) -> Any:
            return wrong(real, *arguments, **options)

        called.__signature__ = inspect.signature(partial(wrong, real))  # type: ignore[attr-defined]
        PLANTED.append(Planted(name, scenario, target, attribute, called, seed))

    return register


@planted("heartbeats are not answered", "connection", Connection, "_handle")
def _(real: Any, conn: Connection, event: Any) -> None:
    if event.__class__ is not Heartbeat:
        real(conn, event)


@planted("who waits to write is not woken", "connection", Connection, "_write_later", 1)
def _(real: Any, conn: Connection, unsent: memoryview) -> None:
    real(conn, unsent)
    conn._writer.pause()  # type: ignore[union-attr]


@planted("a byte of what did not fit is lost", "connection", Connection, "_write_later", 1)
def _(real: Any, conn: Connection, unsent: memoryview) -> None:
    real(conn, unsent[1:] if len(unsent) > 1 else unsent)


@planted("the stream is ended before the rest is sent", "connection", Connection, "close", 45)
def _(real: Any, conn: Connection, *arguments: Any, **options: Any) -> None:
    real(conn, *arguments, **options)
    if conn._is_leaving and conn._unsent is not None:
        conn._say_goodbye()


@planted("lost commands are not told of", "connection", Connection, "_failed", 3)
def _(real: Any, conn: Connection, token: Any, error: Any) -> None:
    if not isinstance(error, ConnectionLost):
        real(conn, token, error)


@planted("what may have been stored is called unsent", "connection", connection_module, "lost_error", 28)
def _(real: Any, text: str, outcome_unknown: bool) -> Any:
    return real(text, outcome_unknown=False)


@planted("the end is told twice", "connection", Connection, "_report")
def _(real: Any, conn: Connection, reason: Any) -> None:
    real(conn, reason)
    real(conn, reason)


@planted("bytes between two layers are lost", "connection", Transport, "upgrade")
async def _(real: Any, transport: Transport, kind: str, leftover: bytes, deadline: float) -> None:
    await real(transport, kind, b"", deadline)


@planted("connecting has no deadline", "connection", Transport, "_wait_for", 17)
async def _(real: Any, transport: Transport, event: str, deadline: float) -> None:
    await real(transport, event, deadline + 1000)


_finishes = itertools.count(1)


@planted("a message is finished twice", "connection", Connection, "finish")
def _(real: Any, conn: Connection, message: Any) -> Any:
    if next(_finishes) % 10 == 0:
        conn.put_bytes(b"FIN %b\n" % message.id)
    return real(conn, message)


@planted("an unknown outcome is tried again where that is not allowed", "producer", publishes, "decide", 28)
def _(real: Any, error: Any, attempts: int, policy: Any, *rest: Any, **options: Any) -> Any:
    return real(error, attempts, msgspec.structs.replace(policy, retry_unknown_outcome=True), *rest, **options)


@planted("a refused body is tried again", "producer", publishes, "decide", 25)
def _(real: Any, error: Any, attempts: int, *rest: Any, **options: Any) -> Any:
    decision = real(error, attempts, *rest, **options)
    is_bad = isinstance(error, BadMessage) and attempts < 3
    return msgspec.structs.replace(decision, retry=True) if is_bad else decision


@planted("possibly_stored is never said", "producer", publishes, "decide", 28)
def _(real: Any, *arguments: Any, **options: Any) -> Any:
    return msgspec.structs.replace(real(*arguments, **options), possibly_stored=False)


@planted("what failed is sent behind what waits", "producer", routing.PartitionQueue, "failed", 296)
def _(_: Any, queue: Any, command: Any, again: Any, delay: float, *, is_stale: bool) -> None:
    queue.in_flight -= 1
    queue.on_wire = None
    queue.is_idle = not queue.is_paused
    queue.waiting.extend(again)
    if delay:
        queue.pause(delay)
    elif queue.waiting:
        queue.pump()


@planted("pauses stay long while publishes wait", "producer", sender.ProducerConnection, "_next_try_at", 2)
def _(real: Any, link: Any) -> Any:
    link._patience = link._pause
    return real(link)


@planted("RDY is one more than the share", "consumer", Sharing, "changes", 1)
def _(real: Any, *arguments: Any) -> Any:
    return [(index, count + 1 if count > 1 else count) for index, count in real(*arguments)]


@planted("what is in flight is not counted", "consumer", Sharing, "changes", 16)
def _(real: Any, sharing: Any, shares: Any, *arguments: Any) -> Any:
    for share in shares:
        share.in_flight = 0
    return real(sharing, shares, *arguments)


@planted("RDY is raised before others are lowered", "consumer", rdy, "plan")
def _(real: Any, shares: Any, wanted: Any, max_in_flight: int, now: float) -> Any:
    as_if_lowered = [
        msgspec.structs.replace(share, rdy=min(share.rdy, want), ceiling=0)
        for share, want in zip(shares, wanted, strict=True)
    ]
    lowers = [(index, want) for index, want in enumerate(wanted) if want < shares[index].rdy]
    raises, waiting = real(as_if_lowered, wanted, max_in_flight, now)
    return raises + lowers, waiting


@planted("a failed message is finished", "consumer", Acknowledger, "failed", 11)
def _(_: Any, acknowledger: Any, message: Any, error: BaseException, *arguments: Any) -> None:
    message.finish()


@planted("what one lookupd says waits for the others", "lookup", LookupPoller, "_take", 69)
def _(real: Any, poller: LookupPoller, topic: PolledTopic, asked_at: float) -> None:
    if not topic.open:
        real(poller, topic, asked_at)


@planted("what a pattern finds waits for all lookupds", "lookup", LookupPoller, "topics", 24)
async def _(real: Any, poller: LookupPoller, on_names: Any = None, grace: float | None = None) -> Any:
    return await real(poller, on_names, None)


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
    target, name = fault.target, fault.attribute
    _check_takes_the_same(getattr(target, name), fault.value)
    is_own, own = name in vars(target), vars(target).get(name)
    setattr(target, name, fault.value)
    try:
        yield
    finally:
        if is_own:
            setattr(target, name, own)
        else:
            delattr(target, name)
