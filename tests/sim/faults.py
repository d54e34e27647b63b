"""What goes wrong, and when: drawn by the seed, and over at a known time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .network import Network
from .nsqd import Books, Log, ModelNsqd, move_leader

KINDS = (
    "cut", "cut_to", "cut_from", "reset", "forget_stream", "freeze", "kill", "vanish", "slow", "small_buffers", "moods",
    "move", "unwritable",
)  # fmt: skip
OF_CLUSTERS = ("move", "unwritable")


class Faults:
    """Faults of a network and its nsqds, from now until ``last_end`` at the latest.

    Attributes:
        periods: (begin, end, kind, host) of each; a stream that was reset is faulty for a moment.
        last_end: from then on everything works.
    """

    def __init__(self, network: Network, books: Books, nsqds: Sequence[ModelNsqd]) -> None:
        self.periods: list[tuple[float, float, str, str]] = []
        self.last_end = network.loop.time()
        self._network, self._books, self._nsqds = network, books, nsqds
        self._loop, self._chance = network.loop, network.chance
        self._busy_until: dict[tuple[str, str], float] = {}

    def plan(self, count: int, within: float, kinds: Sequence[str], longest: float = 30.0) -> None:
        """So many, beginning within so many seconds, each for at most ``longest``."""
        chance, now = self._chance, self._loop.time()
        for _ in range(count):
            kind = chance.choice(kinds)
            begin = now + chance.random() * within
            end = begin + chance.long_tailed(0.01, longest)
            nsqd = chance.choice(self._nsqds)
            place = (nsqd.address[0], kind if kind in ("reset", "forget_stream") else "host")
            if self._busy_until.get(place, 0.0) > begin:
                continue  # one at a time for a host: how they end would be unclear
            self._busy_until[place] = end + 0.01
            self.last_end = max(self.last_end, end)
            self.periods.append((begin, end, kind, nsqd.address[0]))
            self._loop.call_at(begin, self._begin, kind, nsqd, end)

    def touched(self, begin: float, end: float, host: str | None = None) -> bool:
        """Whether any of them falls into these times."""
        return any(start <= end and stop >= begin and host in (None, where) for start, stop, _, where in self.periods)

    def _begin(self, kind: str, nsqd: ModelNsqd, end: float) -> None:
        self._books.note(f"fault {kind} at {nsqd} for {end - self._loop.time():.3f} s")
        undo: Callable[[], Any] | None = getattr(self, f"_{kind}")(nsqd)
        if undo is not None:
            self._loop.call_at(end, self._end, kind, nsqd, undo)

    def _end(self, kind: str, nsqd: ModelNsqd, undo: Callable[[], Any]) -> None:
        self._books.note(f"fault {kind} at {nsqd} is over")
        undo()

    def _cut(self, nsqd: ModelNsqd, **directions: bool) -> Callable[[], Any]:
        nsqd.host.cut(**directions)
        return nsqd.host.mend

    def _cut_to(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        return self._cut(nsqd, from_it=False)

    def _cut_from(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        return self._cut(nsqd, to_it=False)

    def _reset(self, nsqd: ModelNsqd) -> None:
        if nsqd.conns:
            self._chance.choice(nsqd.conns).drop("reset by a fault", is_abrupt=True)

    def _forget_stream(self, nsqd: ModelNsqd) -> None:
        """A middlebox forgets one: nothing passes any more, either way, and nobody is told."""
        if nsqd.conns:
            end = self._chance.choice(nsqd.conns).end
            assert end.peer is not None
            end.is_swallowing = end.peer.is_swallowing = True

    def _freeze(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        nsqd.freeze()
        return nsqd.thaw

    def _replace_leader(self, nsqd: ModelNsqd) -> None:
        """The cluster gives what a dead nsqd led to one that lives."""
        living = [other for other in self._nsqds if other.is_running]
        for log in nsqd.cluster:
            if log.leader is nsqd and not nsqd.is_running and living:
                move_leader(log, self._chance.choice(living))

    def _kill(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        nsqd.kill()
        return self._replaced(nsqd)

    def _vanish(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        nsqd.vanish()
        return self._replaced(nsqd)

    def _replaced(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        """Others lead soon what this one led."""
        self._loop.call_later(0.2 + 3 * self._chance.random(), self._replace_leader, nsqd)
        return nsqd.come_back

    def _slow(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        host, before = nsqd.host, nsqd.host.delays
        host.delays = (0.05, self._chance.choice((0.3, 1.5)))
        return lambda: setattr(host, "delays", before)

    def _small_buffers(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        ends = [end for conn in nsqd.conns for end in (conn.end, conn.end.peer) if end is not None]
        for end in ends:
            end.capacity = self._chance.randint(300, 5000)

        def undo() -> None:
            for end in ends:
                end.capacity = 200_000
                end.has_room()

        return undo

    def _moods(self, nsqd: ModelNsqd) -> Callable[[], Any]:
        moods, chance = nsqd.moods, self._chance
        name = chance.choice(("refuses", "lies", "forgets", "late"))
        setattr(moods, name, chance.choice((0.1, 0.5, 1.0)))
        moods.lateness = chance.choice((0.1, 3.0))
        return lambda: setattr(moods, name, 0.0)

    def _move(self, nsqd: ModelNsqd) -> Callable[[], Any] | None:
        """A partition goes to another nsqd, after a time without any leader."""
        others = [other for other in self._nsqds if other is not nsqd]
        log = self._led_by(nsqd) if others else None
        if log is None:
            return None
        other = self._chance.choice(others)
        self._loop.call_later(self._chance.random() * 0.02, move_leader, log, other)
        return self._closed(log)

    def _unwritable(self, nsqd: ModelNsqd) -> Callable[[], Any] | None:
        log = self._led_by(nsqd)
        return None if log is None else self._closed(log)

    def _led_by(self, nsqd: ModelNsqd) -> Log | None:
        logs = [log for log in nsqd.cluster if log.leader is nsqd]
        return self._chance.choice(logs) if logs else None

    @staticmethod
    def _closed(log: Log) -> Callable[[], Any]:
        """It takes no publishes."""
        log.is_writable = False
        return lambda: setattr(log, "is_writable", True)
