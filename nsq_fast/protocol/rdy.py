"""How a consumer shares its max_in_flight out over connections, its backoff, and delays that grow: no clock, no I/O.

Time comes in as ``now`` (seconds of any steady clock), chance as a ``random`` that gives numbers in [0, 1).

nsqd pushes while a connection's in flight is below its RDY, so RDY is a
ceiling and not a credit that is used up. What must hold at every moment is

    sum over connections of max(RDY last sent, in flight)  <=  max_in_flight

and no RDY above its server's max_rdy_count. A connection whose RDY was lowered
therefore frees its share only as its messages are answered. A lower is also
not known to the server at once: messages pushed before it may still be on the
way, so the old ceiling stays charged for ``SETTLE`` seconds.

``Sharing.wanted`` says what every connection should have, ``plan`` which commands may
be sent now on the way there, lowers first. Whoever owns the connections sends
what ``Sharing.changes`` makes of both, notes it with ``Share.sent``, and calls again
when something happened, or when ``next_look`` said so: a connection came or went,
max_in_flight or the backoff changed; and, while ``is_waiting``, messages were
responded to.

With fewer messages than connections, ``wanted`` has them take turns at RDY 1:

    waits, RDY 0  --- the others' turns are over, it waits longest --->  has RDY 1
                  <-- nothing came for a part of the idle timeout; or
                      for the idle timeout, after something came; or
                      it has had it for HOLD_FACTOR idle timeouts -----
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Protocol

import msgspec

from nsq_fast._record import Record

SETTLE = 0.25
"""Seconds that a server may take to see a lower and its last messages to arrive here."""

HOLD_FACTOR = 3
"""A busy connection keeps a scarce RDY for so many idle timeouts before others get a turn."""

PROBES = 10
"""A connection that got nothing in its turn passes a scarce RDY on after this part of an idle timeout: nsqd pushes at
once what it has, so that silence says that it has nothing. With 1, idle connections keep the busy ones waiting."""

STARVED_RATIO = 0.85
"""Share of RDY in flight from which a connection counts as starved: foresees starvation, as the NSQ guide asks."""

LOOKS = 4
"""Turns that are as short as can be are looked at so often in each."""

Random = Callable[[], float]


class Share(msgspec.Struct):
    """What the distribution knows of one connection.

    Attributes:
        max_rdy_count: the server's limit.
        capacity: how many messages the handlers of this connection can take on; 0 while all of them are stuck.
        rdy: last RDY sent.
        in_flight: messages received and not answered; the caller keeps it current.
        active_at: when the last message arrived, or RDY left 0 if that was later.
        turn_at: when RDY last went to 0 or left it.
        ceiling: highest RDY that the server may still act upon, until ``settles_at``.
    """

    max_rdy_count: int = 2500
    capacity: int = 1 << 30
    rdy: int = 0
    in_flight: int = 0
    active_at: float = 0.0
    turn_at: float = 0.0
    ceiling: int = 0
    settles_at: float = 0.0

    def highest(self, now: float) -> int:
        """The highest RDY that the server may act upon, or may have acted upon for messages that are on their way."""
        return max(self.rdy, self.ceiling) if now < self.settles_at else self.rdy

    def held(self, now: float) -> int:
        """How many messages of max_in_flight this connection may hold now or soon."""
        return max(self.in_flight, self.highest(now))

    def sent(self, rdy: int, now: float) -> None:
        """Note that RDY was sent."""
        # A raise is in force at once, for all we know; a lower RDY only when the server has read it, and what it has
        # pushed before is still on its way.
        if rdy < self.rdy:
            self.ceiling = self.highest(now)
            self.settles_at = now + SETTLE
        if (rdy == 0) != (self.rdy == 0):
            self.turn_at = now
            self.active_at = max(self.active_at, now)
        self.rdy = rdy


def is_starved(held: int, rdy: int) -> bool:
    """Whether (almost) as many messages are held as the server may send."""
    return held > 0 and held >= rdy * STARVED_RATIO


def split(total: int, caps: Sequence[int]) -> list[int]:
    """Share ``total`` out as evenly as ``caps`` allow; nothing is left over that a cap leaves room for."""
    result = [0] * len(caps)
    left = total
    order = sorted(range(len(caps)), key=caps.__getitem__)
    for position, index in enumerate(order):
        result[index] = min(caps[index], left // (len(order) - position))
        left -= result[index]
    return result


def plan(
    shares: Sequence[Share], wanted: Sequence[int], max_in_flight: int, now: float
) -> tuple[list[tuple[int, int]], bool]:
    """The RDYs that may be sent now to bring ``shares`` to what is ``wanted``, in this order, as (index, RDY).

    And whether some connection stays below that until others have answered their messages.
    """
    changes = [(index, want) for index, want in enumerate(wanted) if want < shares[index].rdy]
    held = [share.held(now) for share in shares]  # one that is lowered holds what it has until the server knows
    free = max_in_flight - sum(held)
    below = [index for index, want in enumerate(wanted) if want > shares[index].rdy]
    if free < 0:  # messages came that were on their way: until they are answered, any raise would keep it so
        return changes, bool(below)
    below.sort(key=lambda index: (shares[index].rdy, shares[index].turn_at))
    granted = {index: shares[index].rdy for index in below}
    for is_fill in (False, True):  # one for each connection at 0 first, so that none waits for another's fill
        for index in below:
            new = min(wanted[index] if is_fill else 1, held[index] + free)
            if new > granted[index]:
                cost = max(0, new - held[index])
                free -= cost
                held[index] += cost
                granted[index] = new
    for index, new in granted.items():
        rdy, want = shares[index].rdy, wanted[index]
        # Not each of the messages that others answer is worth a command.
        if new == want or (new > rdy and (rdy == 0 or new - rdy >= want // 4)):
            changes.append((index, new))
    return changes, any(new < wanted[index] for index, new in granted.items())


class Sharing:
    """Shares max_in_flight out over the connections of one consumer.

    Args:
        idle_timeout: seconds without a message after which a connection passes a scarce RDY on.
        random: gives numbers in [0, 1).

    Attributes:
        is_waiting: whether some connection waits for a share that others still hold.
    """

    def __init__(self, idle_timeout: float, random: Random) -> None:
        self._idle_timeout = idle_timeout
        self._random = random
        self.is_waiting: bool = False

    def changes(
        self, shares: Sequence[Share], limit: int, allowed: int, now: float, expected: int = 0
    ) -> list[tuple[int, int]]:
        """The RDYs to send now, as (index of the connection, RDY); whoever sends one notes it with ``Share.sent``.

        Args:
            limit: messages to ask for, over all connections.
            allowed: messages that may be held, over all connections; not below ``limit``.
            expected: connections that are being made, for which room is kept.
        """
        absent = [Share() for _ in range(expected)] if limit >= len(shares) + expected else []
        wanted = self.wanted([*shares, *absent], limit, now)
        changes, self.is_waiting = plan(shares, wanted[: len(shares)], allowed, now)
        return changes

    def next_look(self, shares: Sequence[Share], backoffs: Iterable[Backoff], limit: int, now: float) -> float | None:
        """Seconds until ``changes`` is to be called again although nothing happened; None for never."""
        moments = [backoff.until for backoff in backoffs if backoff.is_paused(now)]
        if self.is_waiting:
            moments.extend(share.settles_at for share in shares if share.settles_at > now)
        if 0 < limit < len(shares):
            moments.append(now + max(SETTLE / LOOKS, self._idle_timeout / PROBES))
        return max(0.0, min(moments) - now) if moments else None

    def wanted(self, shares: Sequence[Share], limit: int, now: float) -> list[int]:
        """The RDY that each connection should have, together at most ``limit``.

        With enough for all it is an even split. Otherwise ``limit`` connections get RDY 1, and those that were idle for
        the idle timeout pass it on; after a part of it (``PROBES``) if they got nothing since they have it. Those
        without capacity get 0.
        """
        able = [index for index, share in enumerate(shares) if share.capacity > 0]
        if limit >= len(able):
            return split(limit, [min(share.max_rdy_count, share.capacity) for share in shares])
        kept = [index for index in able if shares[index].rdy > 0 and not self._turn_is_over(shares[index], now)]
        kept.sort(key=lambda index: shares[index].active_at, reverse=True)
        del kept[max(limit, 0) :]
        keeps = set(kept)
        # Who waits longest comes first, so that nobody sticks at RDY 0; among equals chance decides.
        others = sorted(
            (_precedence(shares[index], now), shares[index].turn_at, self._random(), index)
            for index in able
            if index not in keeps
        )
        chosen = {*kept, *(entry[-1] for entry in others[: max(limit, 0) - len(kept)])}
        return [int(index in chosen) for index in range(len(shares))]

    def _turn_is_over(self, share: Share, now: float) -> bool:
        # A message may need as long on its way as a command: no turn is shorter than that.
        has_brought_something = share.active_at > share.turn_at
        patience = max(SETTLE, self._idle_timeout if has_brought_something else self._idle_timeout / PROBES)
        if share.in_flight == 0 and now - share.active_at > patience:
            return True
        return now - share.turn_at > HOLD_FACTOR * max(SETTLE, self._idle_timeout)


def _precedence(share: Share, now: float) -> int:
    """In which order turns are given out: to those who wait, then to those who have had one.

    Whoever has just lost its turn comes last: the room that it leaves is for who waited longer, and it would take that
    back before the server knows that it is free.
    """
    if share.rdy > 0:
        return 1
    return 0 if share.settles_at <= now else 2


class BackoffStrategy(Protocol):
    """How long the pauses of backoff are. Without state and without a clock: levels in, seconds out."""

    @property
    def jitter(self) -> float:
        """The share of each pause that chance may take away: 0.0 for none, 1.0 for all of it."""

    def duration(self, level: int) -> float:
        """The longest pause at ``level`` in seconds: 1 after the first failure, one more after each that follows."""


class ExponentialBackoff(Record, frozen=True):
    """Pauses that grow by ``factor`` with each level, from ``base`` seconds on; a BackoffStrategy.

    With ``jitter=1.0`` a pause is any time up to that: consumers that failed together do not come back together.
    """

    base: float = 1.0
    factor: float = 2.0
    jitter: float = 0.1

    def duration(self, level: int) -> float:
        """The longest pause at ``level`` in seconds."""
        return grown(self.base, self.factor, level - 1, inf)


MOST_LEVELS = 32
"""A strategy whose pauses do not grow to the longest ends here: recovery takes no more successes than levels."""


class Backoff:
    """Backoff of a consumer as the NSQ guide says: pause, probe with one message, recover or pause longer.

    Each pause is a window; results that arrive within it are not counted, so
    one result moves the level once per window. The pause doubles with each
    level up to ``max_duration`` seconds, or does what ``strategy`` says; 0 turns backoff off.
    A failure raises the level by one, a success halves it.
    """

    def __init__(
        self,
        max_duration: float,
        *,
        random: Random,
        base: float = 1.0,
        jitter: float = 0.1,
        strategy: BackoffStrategy | None = None,
    ) -> None:
        self._max_duration = max_duration
        self._strategy = strategy or ExponentialBackoff(base, 2.0, jitter)
        self._random = random
        self.level: int = 0
        self.until: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether failures are being recovered from: paused, or probing."""
        return self.level > 0

    def is_paused(self, now: float) -> bool:
        """Whether nothing may be asked for yet. When on and not paused, one message at a time may."""
        return self.level > 0 and now < self.until

    def limit(self, usual: int, allowed: int, now: float) -> int:
        """Messages to ask for: ``usual``; none in a pause, then one if ``allowed`` has room for it: a probe."""
        return usual if not self.is_on else 0 if self.is_paused(now) else min(1, allowed)

    def record(self, success: bool, now: float) -> bool:
        """Count the result of a message; say whether it changed anything."""
        if now < self.until or self._max_duration <= 0.0 or (success and self.level == 0):
            return False
        if success:
            self.level = self.level_after_success(self.level)
        elif self.level == 0 or (self.level < MOST_LEVELS and self._duration(self.level) < self._max_duration):
            self.level += 1  # bounded by the cap, so that recovery takes no more steps than the cap has levels
        if self.level:
            self.pause(now)
        else:
            self.until = 0.0
        return True

    @staticmethod
    def level_after_success(level: int) -> int:
        """The next level. Halved, not one less: the pauses of all levels together are as long as the failure was."""
        return level // 2

    def pause(self, now: float) -> None:
        """Begin a pause of the length that the present level asks for."""
        self.until = now + self._with_jitter(self._duration(self.level))

    def probe(self) -> None:
        """End the pause, and let one message show whether things are better."""
        # The level stays: only the result of the message may lower it.
        self.until = 0.0

    def reset(self) -> None:
        """Forget all failures."""
        self.level = 0
        self.until = 0.0

    def _duration(self, level: int) -> float:
        return min(max(0.0, self._strategy.duration(level)), self._max_duration)

    def _with_jitter(self, duration: float) -> float:
        return duration * (1.0 - self._strategy.jitter * self._random())


# Delays that grow: those of reconnecting and of requeues.
#
# Nothing here overflows or gives up, however often something fails.


def grown(base: float, factor: float, steps: int, cap: float) -> float:
    """``base * factor ** steps``, at most ``cap``, for any number of steps."""
    if base <= 0.0:
        return 0.0
    try:
        return min(cap, base * factor**steps)
    except OverflowError:
        return cap


class ReconnectDelay:
    """Pauses between attempts to connect: doubling, with jitter, capped, without end.

    A connection that lasted ``good_after`` seconds was good: the next pause starts from ``base`` again.
    One that is accepted and closed at once keeps the pauses growing.
    """

    def __init__(
        self, max_delay: float, *, random: Random, base: float = 0.1, good_after: float = 5.0, factor: float = 2.0
    ) -> None:
        self._max_delay = max_delay
        self._random = random
        self._base = base
        self._factor = factor
        self._good_after = good_after
        self._failures = 0
        self._connected_at: float | None = None

    def connected(self, now: float) -> None:
        """Note that a connection was made and subscribed."""
        self._connected_at = now

    def next(self, now: float) -> float:
        """Seconds to wait after the connection was lost, or could not be made."""
        if self._connected_at is not None and now - self._connected_at >= self._good_after:
            self._failures = 0
        self._connected_at = None
        delay = grown(self._base, self._factor, self._failures, self._max_delay)
        # Not counted above the cap: the power would overflow after a night without a server.
        if delay < self._max_delay:
            self._failures += 1
        return delay * (0.5 + 0.5 * self._random())


class RequeueDelay:
    """Delay of a requeue from the attempts of its message: ``base * factor ** (attempts - 1)``, capped, with jitter.

    Args:
        fixed_ms: when given, every requeue is delayed by exactly this, in ms.
        base, cap: seconds.
        jitter: share of the delay that chance adds or takes.
    """

    def __init__(
        self, fixed_ms: int | None, *, base: float, factor: float, cap: float, jitter: float, random: Random
    ) -> None:
        self._fixed_ms = fixed_ms
        self._base = base
        self._factor = factor
        self._cap = cap
        self._jitter = jitter
        self._random = random

    def __call__(self, attempts: int) -> int:
        """The delay in milliseconds."""
        if self._fixed_ms is not None:
            return self._fixed_ms
        delay = grown(self._base, self._factor, max(attempts - 1, 0), self._cap)
        delay *= 1.0 + self._jitter * (2.0 * self._random() - 1.0)
        return int(1000 * min(delay, self._cap))
