"""Publishes that another thread sends, and takes the reply to, while the hub thread sleeps.

A publish that is handed over wakes the hub thread, which sends it; the reply
wakes the hub thread again, and that wakes the caller. Where one publish follows
the other, one at a time, these wake-ups take most of the time. Then the other
thread writes to the socket and reads it, and the hub thread sleeps on
(``nsq-fast bench publish --client "nsq_fast aio" --mode single``: nearly twice
as many). Whatever is not the usual is left to the hub thread: a reply other
than OK, a heartbeat, the end of the connection, a command that the system does
not take at once.

Who may do what. All that a producer knows belongs to the hub thread. Another
thread may look at it, and use the socket, while it has a permit; and there is
one only while the hub thread sleeps, so that nothing changes meanwhile. When
that wakes up, whatever for, it revokes the permit before any other callback
runs, and takes over what has no reply yet, as if it had just sent it itself.
Who has seen the permit before sends nothing after that.

There is a permit only where nothing is on its way, for a producer that has
nothing pending. So no publish passes another, and the limits hold.

| state | what happened                                          | next state                                |
|-------|--------------------------------------------------------|-------------------------------------------|
| off   | ``LONE`` requests, one after the other, each alone     | on, if there is a connection to lend      |
| on    | the hub is about to sleep, and nothing is on its way   | on, with a permit; the socket is lent     |
| on    | it wakes up                                            | on, without; it takes over what was begun |
| on    | a request is handed over all the same                  | off                                       |
| on    | none was sent directly for ``PERIOD``                  | off                                       |
| on    | the connection or the producer ends, the hub thread    | off                                       |
|       | fails, or the process forks                            |                                           |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from gevent import get_hub

from nsq_fast._send_permit import SendPermit
from nsq_fast.errors import NotRunning
from nsq_fast.protocol.publish import sent, stored
from nsq_fast.protocol.wire_form import OK, PLAIN
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.loop_turns import FIRST, LAST
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.publishing.delivery import Delivery
from nsq_fast.runtime.publishing.destination import NsqdQueue, new_command
from nsq_fast.runtime.publishing.link import Link
from nsq_fast.runtime.publishing.publish import Publish
from nsq_fast.runtime.publishing.topic_route import TopicRoute
from nsq_fast.runtime.trace import TraceLog

from .hub_thread import HubThread
from .lent_socket import LentSocket, new_epoll
from .requests import Request

if TYPE_CHECKING:
    from nsq_fast.runtime.publishing.publish import Promise

LONE = 8
"""After so many requests that came one at a time, the next ones are sent directly."""

PERIOD = 0.1
"""Seconds between two looks of the hub thread: it knows of each publish after that, and of its deadline."""

SHORTEST_TIMEOUT = 10 * PERIOD
"""A producer whose publishes end sooner does not send directly: their deadlines would be too late."""


if TYPE_CHECKING:

    class DirectPromise(Promise, Protocol):
        """What gets the result of a publish that was sent directly."""

        def set_here(self, value: Any) -> object:
            """It went well. In the other thread."""


class DirectSender:
    """Sends directly for one producer. Its methods belong to the hub thread, but for those below.

    Args:
        timeout: seconds that a publish may take.
        requests: publishes that were handed over, and not taken yet.
        routes: gives the routes by topic.

    Attributes:
        sent: how many publishes were sent directly, as far as the hub thread knows.
        permit: while that has a number ``try_send`` may send.
    """

    def __init__(
        self,
        thread: HubThread,
        delivery: Delivery,
        timeout: float,
        trace: TraceLog,
        requests: Sequence[Request],
        routes: Callable[[], Mapping[str, TopicRoute]],
    ) -> None:
        self._loop: Any = get_hub().loop
        # Only libev says when it is about to sleep, after all else, and that it woke up, before all else.
        self._is_libev = type(self._loop).__module__ == "gevent.libev.corecext"
        self._thread = thread
        self._delivery = delivery
        self._limit = delivery.pending_limit
        self._timeout = timeout
        self._trace = trace
        self._requests = requests
        self._routes = routes
        self.permit = SendPermit()
        self._promise: DirectPromise | None = None
        self._socket: LentSocket | None = None
        self._is_allowed = False
        self._is_on = False
        self._lone = 0
        self.sent = self._seen = 0
        self._stored = self._noted = 0
        self._link: Link | None = None
        self._last_of_turn: list[Callable[[], object]] = []
        self._before_sleep = self._loop.prepare(ref=False, priority=LAST)
        self._after_sleep = self._loop.check(ref=False, priority=FIRST)
        self._period = self._loop.timer(PERIOD, PERIOD, ref=False)
        tell_forks(self)

    # In the other thread

    def allow(self) -> int | None:
        """``try_send`` is called from now on. Returns the descriptor to watch: call ``readable`` when it is readable.

        None: nothing is sent directly.
        """
        delivery = self._delivery
        is_simple = not delivery.lingers and delivery.timing is None and self._timeout >= SHORTEST_TIMEOUT
        if self._is_libev and is_simple and new_epoll is not None:
            with suppress(OSError):  # no descriptor is left: it works without
                self._socket = LentSocket(new_epoll(), new_epoll())
                self._is_allowed = True
                return self._socket.descriptor
        return None

    def try_send(self, topic: Any, body: Any, promise: DirectPromise) -> Publish | None:
        """Send a publish that has no further arguments; None: nothing was done and nothing checked, hand it over."""
        permit = self.permit.number  # before anything else is looked at
        if not permit:
            return None
        route = self._routes().get(topic) if topic.__class__ is str else None
        link = self._link
        if (route is None or link is None or self._requests or self._trace.is_active) or (
            body.__class__ is not bytes or not 0 < len(body) <= route.plain_size
        ):
            return None
        queue = route.any
        links = queue.links
        if len(links) != 1 or links[0] is not link or queue.__class__ is not NsqdQueue or link.conn is None:
            return None
        route.is_used = True
        publish = Publish(queue, body, monotonic() + self._timeout)
        publish.promised = self._promise = promise
        data = PLAIN.command(topic, body, None, link.conn.session.dialect)[1]
        size = self.permit.send(permit, publish, data)
        if not size:
            return None
        if size < len(data):
            self._wake()
        return publish

    def readable(self) -> None:
        """The descriptor is readable: a reply has come, or something else that the hub thread has to look at."""
        permit = self.permit
        publish: Any = permit.receive()
        if publish is not None:
            stored((publish,))
            self._stored += 1
            publish.promised = None  # see Publish.wake
            assert self._promise is not None
            self._promise.set_here(OK)
        elif permit.has_news:
            self._wake()

    @property
    def is_used(self) -> bool:
        """Whether a publish was sent that the hub thread does not know of yet. In any thread."""
        return self.permit.is_used

    def _wake(self) -> None:
        with suppress(NotRunning):  # it has failed just now, and tells whoever waits for the publish
            self._thread.submit(_look_at_permit)

    # In the hub thread

    def requested(self) -> None:
        """Requests were handed over, or none are to come."""
        if self._is_on:
            self.stop()
        requests = self._requests
        if len(requests) != 1 or self._limit.used or not self._is_allowed:
            self._lone = 0
            return
        self._lone += 1
        route = self._routes().get(requests[0].topic)
        if self._lone >= LONE and route is not None and len(route.any.links) == 1:
            self._lone = 0
            self._begin(route.any.links[0])

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """As ``HubThread.at_end_of_turn``; where there may be a permit then, after that: who is woken can use it."""
        if self._is_on:
            self._last_of_turn.append(function)
        else:
            self._thread.at_end_of_turn(function)

    def stop(self) -> None:
        """No permit, from now on."""
        self._take_over()
        if self._is_on and self._socket is not None:
            self._is_on = False
            self._before_sleep.stop()
            self._after_sleep.stop()
            self._period.stop()
            self._socket.end()
            self._link = None
            self._call_last()

    def forked(self) -> None:
        """In the child of a fork: what was sent is the parent's."""
        self.permit.revoke()
        self._is_allowed = self._is_on = False
        self._link = None

    def _begin(self, link: Link) -> None:
        if link.conn is not None and self._socket is not None and self._socket.begin(link.conn, self._loop):
            self._link = link
            self._is_on = True
            self._before_sleep.start(self._end_turn)
            self._after_sleep.start(self._take_over)
            self._period.start(self._look)

    def _end_turn(self) -> None:
        limit, link, socket = self._limit, self._link, self._socket
        assert link is not None
        assert socket is not None
        conn = socket.conn
        if conn is None or link.conn is not conn:
            self.stop()
            return
        if not limit.used and not limit.queue and conn.is_quiet:
            socket.lend()
            self.permit.grant(socket.number)
        if self._last_of_turn:
            self._call_last()

    def _call_last(self) -> None:
        functions, self._last_of_turn = self._last_of_turn, []
        for function in functions:
            function()

    def _take_over(self) -> None:
        """No permit; what was sent with it, and what was read that is no OK, is the hub thread's."""
        left: Any = self.permit.revoke()
        conn = None if self._socket is None else self._socket.conn
        if self._stored != self._noted:
            self._note_stored(conn)
        if self._socket is None or conn is None:
            return
        self._socket.take_back()
        if left is None:
            return
        publish, unsent, received = left
        if publish is not None:
            self._was_sent(publish, unsent, conn)
        if received is not None:
            conn.take_reply(received)

    def _note_stored(self, conn: Connection | None) -> None:
        count = self._stored - self._noted
        self._noted += count
        self.sent += count
        self._delivery.outcomes.stored += count
        if conn is not None:
            conn.last_received_at = monotonic()

    def _was_sent(self, publish: Publish, unsent: bytes | None, conn: Connection) -> None:
        self.sent += 1
        self._limit.used += publish.weight
        queue: Any = publish.destination
        command = new_command(queue, [publish])
        command.name, command.conn = "PUB", conn
        conn.was_sent(command.name, command, unsent)
        sent([publish], command)
        self._delivery.pending.add(publish)

    def _look(self) -> None:
        if self.sent == self._seen:
            self.stop()
        self._seen = self.sent


def _look_at_permit() -> None:
    """The hub thread wakes up for this, and does so."""
