"""The state of each connection under gnsq's names, with those that begin with an underscore: programs' tests use them.

gnsq has a backoff for each connection; ours is one for the consumer, as NSQ's
documentation asks for. So all connections show the same state, unless the
option backoff_scope="connection" gives each its own.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from gevent.event import Event

from nsq_fast.protocol.backoff import Backoff
from nsq_fast.runtime import Connection

from .backofftimer import BackoffTimer
from .states import BACKOFF, INIT, RUNNING, THROTTLED

if TYPE_CHECKING:
    from nsq_fast.runtime import Flow, Subscriber


class _Level(BackoffTimer):
    """The failures of a consumer's backoff, as a BackoffTimer."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        super().__init__()

    @property
    def c(self) -> int:
        return self._backoff.level

    @c.setter
    def c(self, value: int) -> None:
        self._backoff.level = value


class _Levels:
    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff

    def __getitem__(self, conn: object) -> BackoffTimer:
        timer = _Level.__new__(_Level)
        timer._backoff = self._backoff
        timer.ratio, timer.max_interval, timer.min_interval = 1, None, None
        return timer


class BackoffStates:
    """Mixed into the consumer."""

    if TYPE_CHECKING:
        flow: Flow

        @property
        def subscribers(self) -> list[Subscriber]:
            """One for each nsqd."""

    @property
    def _connections(self) -> dict[Any, int]:
        return {each.connection: self._state(each) for each in self.subscribers}

    def _state(self, subscriber: Subscriber) -> int:
        if not subscriber.is_connected:
            return INIT
        backoff = subscriber.backoff
        return RUNNING if not backoff.is_on else BACKOFF if backoff.is_paused(monotonic()) else THROTTLED

    @property
    def _message_backoffs(self) -> _Levels:
        return _Levels(self.flow.backoff)

    @property
    def _redistributed_ready_event(self) -> Event:
        flow = self.flow
        if flow.members_changed is None:
            is_ready = Event()
            flow.members_changed = lambda: is_ready.set() if flow.has_members else is_ready.clear()
            flow.members_changed()
            vars(self)["_ready_event"] = is_ready
        event: Event = vars(self)["_ready_event"]
        return event

    def redistribute_ready_state(self) -> None:
        """Have RDY redistributed soon."""
        self.flow.changed()

    def _redistribute_ready_state(self) -> None:
        self.flow.update(monotonic())

    def _start_backoff(self, conn: Connection) -> None:
        self.flow.backoff.pause(monotonic())
        self.flow.changed()

    def _start_throttled(self, conn: Connection) -> None:
        self.flow.backoff.probe()
        self.flow.changed()

    def _complete_backoff(self, conn: Connection) -> None:
        if self.flow.backoff.is_on:
            self._start_backoff(conn)
        else:
            self._start_throttled(conn)
