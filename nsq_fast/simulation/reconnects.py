"""Connections to nsqds that die and come back, with the pauses of `protocol.backoff.ReconnectDelay`.

The model of an nsqd: it accepts ``capacity`` connections a second, handshake and SUB included; those that come faster
wait. While it is down it refuses them at once. A client whose connection was lost asks lookup, too.
"""

from __future__ import annotations

from nsq_fast.protocol.backoff import ReconnectDelay
from nsq_fast.protocol.lookup_schedule import lost_pause

from .events import Curve, Simulation
from .lookups import Client


class Nsqd:
    """A process that accepts connections.

    Attributes:
        attempts: connections that were tried, over time.
        live: those that there are.
        whole_at: when the last one was accepted.
    """

    def __init__(self, simulation: Simulation, capacity: float, interval: float) -> None:
        self._simulation = simulation
        self._seconds = 1.0 / capacity
        self._free_at = 0.0
        self._epoch = 0
        self.is_up = True
        self.attempts = Curve(interval)
        self.live: set[Connection] = set()
        self.whole_at = 0.0

    def stop(self) -> None:
        """Die: every connection is lost."""
        self.is_up = False
        self._epoch += 1
        lost, self.live = self.live, set()
        for connection in sorted(lost, key=lambda each: each.number):
            connection.lost()

    def start(self) -> None:
        """Come back."""
        self.is_up = True
        self._free_at = self._simulation.now

    def connect(self, connection: Connection) -> None:
        """A connection is tried."""
        now = self._simulation.now
        self.attempts.add(now)
        if not self.is_up:
            connection.lost()
            return
        self._free_at = max(self._free_at, now) + self._seconds
        self._simulation.after(self._free_at - now, self._accepted, connection, self._epoch)

    def _accepted(self, connection: Connection, epoch: int) -> None:
        if epoch != self._epoch or not self.is_up:
            connection.lost()
            return
        self.live.add(connection)
        self.whole_at = self._simulation.now
        connection.connected()


class Connection:
    """One connection of a consumer, which is made again whenever it is lost.

    Args:
        is_spread: whether lookup is asked after `lost_pause`; at once otherwise.
    """

    def __init__(
        self,
        simulation: Simulation,
        nsqd: Nsqd,
        number: int,
        delay: ReconnectDelay,
        lookup: Client,
        is_spread: bool = True,
    ) -> None:
        self._simulation = simulation
        self._nsqd = nsqd
        self._lookup = lookup
        self._delay = delay
        self._is_spread = is_spread
        self.number = number

    def begin(self) -> None:
        """Be connected already, and for long."""
        self._delay.connected(-1e6)
        self._nsqd.live.add(self)

    def connected(self) -> None:
        """It is subscribed."""
        self._delay.connected(self._simulation.now)

    def lost(self) -> None:
        """It was lost, or refused."""
        self._lookup.refresh(lost_pause(self._simulation.random.random()) if self._is_spread else 0.0)
        self._simulation.after(self._delay.next(self._simulation.now), self._nsqd.connect, self)
