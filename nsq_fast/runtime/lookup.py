"""Polling of the lookup services: where do my topics live, now?

One greenlet polls. In each round every lookupd is asked at once, each request
under a total timeout, and the good answers are merged into one `Topology` a
topic. Bad answers are ignored and logged when a lookupd begins to fail, not at
every poll; one that keeps failing is asked less often until it answers again.
A round that waits for a slow lookupd publishes what the others said, and does
not hold up the next round. When all of them fail, what was known stays, and
rounds come quicker; so they do for a consumer's topic that nobody knows yet.
The list of lookupds grows by what they say of each other, and by what an etcd says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Literal

from gevent import getcurrent, killall, sleep
from gevent.event import Event

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, LookupFailed, NotRunning
from nsq_fast.names import check_topic
from nsq_fast.printable import printable
from nsq_fast.protocol.discovery import keep_of
from nsq_fast.protocol.lookup_schedule import PollTimes
from nsq_fast.protocol.topology import LookupAnswer, Nsqd, Topology

from .lookup_round import LookupRound, PolledTopic
from .lookupd import Lookupd
from .lookupd_list import Follower, LookupdArgument, LookupdList
from .net.http import Endpoint
from .node_list import STRAGGLER_GRACE, NodeList
from .owner_thread import OwnerThread
from .supervised import FAULTS, JobGroup, Loop, Supervisor
from .topic_lister import TopicLister

Access = Literal["r", "w"]
Listener = Callable[[str, Topology], None]

_STOP_TIMEOUT = 1.0
_TOPICS_A_TURN = 100

log = logging.getLogger("nsq_fast.lookup")


class LookupPoller:
    """Keeps the topology of some topics up to date.

    Args:
        lookupds: ``host``, ``host:port``, ``http://...``, ``https://...`` or (host, port) pairs; a string may
            hold several, separated by commas. Default port 4161. ``etcd://host:port/cluster`` or EtcdLookupds stand for
            those that are registered in the etcd of a redesigned cluster.
        config: intervals, timeout, Authorization header.
        access: ``"r"`` for consumers, ``"w"`` for producers. Original lookupds ignore it.
        listener: called as ``listener(topic, topology)`` in the poller's greenlet after each round that at least
            one lookupd answered, whether something changed or not. It should not block.
        supervisor: of the owner; it hears of faults in our greenlets.

    Attributes:
        errors: questions that a lookupd gave no good answer to, since the start.
        lister: asks which topics there are, while the poller runs.

    Raises ConfigError for an address that cannot be used.
    """

    def __init__(
        self,
        lookupds: LookupdArgument,
        config: LookupConfig | None = None,
        access: Access = "r",
        listener: Listener | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        if access not in ("r", "w"):
            raise ConfigError(f"access={access!r}: must be 'r' or 'w'")
        if config is not None and not isinstance(config, LookupConfig):
            raise ConfigError(f"config={config!r}: must be a LookupConfig, or None")
        if listener is not None and not callable(listener):
            raise ConfigError(f"listener={listener!r}: must be callable, or None")
        self._config = config or LookupConfig()
        self._keep = keep_of(self._config.discovery_filter)
        self._searches = access == "r" and listener is not None
        self._listener = listener
        self._thread = OwnerThread()
        self._supervisor = supervisor or Supervisor(log)
        self._lookupds = LookupdList(lookupds, self._config, access)
        self._topics: dict[str, PolledTopic] = {}
        self._rounds: list[LookupRound] = []
        self._round_number = 0
        self._polls = PollTimes(self._config)
        self.errors = 0
        self._wake = Event()
        self._poller: Loop | None = None
        self._followers: list[Loop] = []
        self._jobs = JobGroup(self._supervisor, "nsq_fast lookup")
        self._nodes = NodeList(self._lookupds, self._jobs, self._config.lookupd_refresh_interval)
        self.lister = TopicLister(self._lookupds, self._jobs)

    @property
    def lookupds(self) -> tuple[str, ...]:
        """URLs of the lookupds that are asked: the configured ones, those of an etcd, those learnt from them."""
        return tuple(str(lookupd.endpoint) for lookupd in self._lookupds)

    @property
    def is_running(self) -> bool:
        """Whether it polls."""
        return self._poller is not None

    def start(self) -> None:
        """Begin to poll, at once. Does nothing when it runs already."""
        self._thread.check("LookupPoller.start()")
        if self._poller is not None:
            return
        self._thread.claim()
        # What was known before ``stop`` stays known, and is asked for again at once.
        for topic in self._topics.values():
            topic.due = 0.0
            if topic.topology is None:
                topic.ready.clear()
        self._poller = self._supervisor.loop("nsq_fast lookup", self._poll_loop)
        self._poller.start()
        for source in self._lookupds.sources:
            ask_now = partial(_ask_now, self._topics.values(), self._wake)
            self._followers.append(Follower(source, self._lookupds, ask_now, self._supervisor).loop)
            self._followers[-1].start()

    def stop(self) -> None:
        """End polling and give up requests under way. Returns soon; may be called from the listener."""
        self._thread.check("LookupPoller.stop()")
        poller, self._poller = self._poller, None
        if poller is None:
            return
        self._wake.set()
        self._rounds.clear()
        self._jobs.kill()
        killall([each for each in self._followers if each is not getcurrent()], block=False)
        self._followers.clear()
        for lookupd in self._lookupds:
            lookupd.is_busy = False  # a job that was killed before it began cannot say so itself
        for topic in self._topics.values():
            topic.ready.set()
        if poller is not getcurrent():
            poller.join(_STOP_TIMEOUT)

    def add_topic(self, topic: str, is_sought: bool = True) -> None:
        """Poll for ``topic`` too; a running poller asks for it at once. Raises NameInvalid.

        A consumer's topic that nobody knows yet is asked for more often, unless ``is_sought`` is False.
        """
        self._thread.check("LookupPoller.add_topic()")
        if topic not in self._topics:
            is_sought = is_sought and self._searches
            self._topics[check_topic(topic)] = PolledTopic(topic, self._config, self._keep, is_sought)
            self._wake.set()

    def remove_topic(self, topic: str) -> None:
        """Forget ``topic``."""
        self._thread.check("LookupPoller.remove_topic()")
        removed = self._topics.pop(topic, None)
        if removed is not None:
            removed.ready.set()

    def refresh(self, topic: str | None = None, later: float = 0.0) -> None:
        """Ask again soon, or in ``later`` seconds, for one topic or for all: what is known proved stale.

        Never blocks. Calls that come in one burst are one round, and there is one round each
        ``lookupd_refresh_interval`` at most; a call that comes too early is served late, not lost.
        """
        self._thread.check("LookupPoller.refresh()")
        if topic is not None:
            self.add_topic(topic)
        now = monotonic()
        for known in [self._topics[topic]] if topic is not None else list(self._topics.values()):
            if known.refresh(now, later):
                self._wake.set()

    def topology(self, topic: str) -> Topology | None:
        """What the last good round said of ``topic``; None before there was one. Empty when the topic is unknown."""
        known = self._topics.get(topic)
        return known.topology if known is not None else None

    def wait_topology(self, topic: str, timeout: float | None = None) -> Topology:
        """Return the topology of ``topic``, waiting for the first good round if need be; adds the topic.

        Raises LookupFailed when ``timeout`` seconds (None: no limit) pass first, or the poller is stopped
        meanwhile; NotRunning when it does not run.
        """
        self._thread.check("LookupPoller.wait_topology()")
        self.add_topic(topic)
        known = self._topics[topic]
        if known.topology is None:
            if not self.is_running:
                raise NotRunning("the lookup poller is not started")
            known.ready.wait(timeout)
        if known.topology is None:
            raise LookupFailed(f"no lookupd answered for topic {topic!r}: {self.failure() or 'no reply yet'}")
        return known.topology

    def nodes(self, timeout: float | None = None) -> tuple[Nsqd, ...]:
        """Ask for every nsqd the lookupds know, whatever its topics: original nsqds create topics on publish.

        ``discovery_filter`` leaves out what it leaves out of topologies.
        Callers share one question, and its answer for ``lookupd_refresh_interval``. Raises LookupFailed when no
        lookupd answers, or ``timeout`` seconds pass.
        """
        self._thread.check("LookupPoller.nodes()")
        found = self._nodes.get(timeout)
        if self._keep is None:
            return found
        try:
            return tuple(nsqd for nsqd in found if self._keep(nsqd))
        except Exception as error:  # a user's function
            raise LookupFailed(f"discovery_filter failed: {printable(repr(error))}") from error

    def failure(self) -> str:
        """Why lookupds did not answer the last time; empty when all did."""
        return self._lookupds.failure()

    def answering(self) -> list[str]:
        """The URLs of the lookupds whose last answer was not a bad one."""
        return [str(lookupd.endpoint) for lookupd in self._lookupds if not lookupd.last_error]

    def change_lookupds(self, added: tuple[Endpoint, ...], removed: frozenset[Endpoint]) -> None:
        """Ask ``added``, too, and never ``removed``, in place of what an earlier call said. Takes effect at once."""
        self._thread.check("LookupPoller.change_lookupds()")
        if self._lookupds.change(added, removed):
            _ask_now(self._topics.values(), self._wake)

    # The poller's greenlet

    def _poll_loop(self) -> None:
        me = getcurrent()
        while self._poller is me:
            self._wake.clear()
            self._start_round()
            self._publish_rounds()
            pause = _pause(self._rounds, self._lookupds, self._topics.values())
            if self._poller is me:
                self._wake.wait(pause)

    def _start_round(self) -> None:
        now = monotonic()
        topics = [topic for topic in self._topics.values() if topic.due <= now]
        lookupds = self._lookupds.free(now)
        if not topics or not lookupds:
            return
        self._round_number += 1
        current = LookupRound(self._round_number, topics, now)
        self._rounds.append(current)
        next_poll = self._polls.after(now, current.chance)
        for topic in topics:
            topic.asked(now, next_poll)
        for lookupd in lookupds:
            lookupd.is_busy = True
            current.pending += 1
            self._jobs.start(self._ask, lookupd, current)

    def _publish_rounds(self) -> None:
        now = monotonic()
        for current in list(self._rounds):
            is_over = current.pending == 0
            if is_over:
                self._rounds.remove(current)
            if is_over or now - current.started_at >= STRAGGLER_GRACE:
                self._publish(current)
            if is_over:
                for topic in current.topics:
                    if topic not in current.answers:
                        topic.unanswered(now, current.chance)

    def _publish(self, current: LookupRound) -> None:
        for number, (topic, answers) in enumerate(list(current.answers.items()), 1):
            if current.is_news(topic):
                try:
                    self._learn(current, topic, answers)
                except FAULTS as fault:
                    self._supervisor.report(f"lookup of {topic.name}", fault, "the other topics are published")
            if number % _TOPICS_A_TURN == 0:
                sleep(0)  # thousands of topics must not hold the hub up

    def _learn(self, current: LookupRound, topic: PolledTopic, answers: list[LookupAnswer]) -> None:
        is_first = topic not in current.published
        current.published[topic] = len(answers)
        topic.round_number = current.number
        topology = topic.learn(answers)
        if not topology.is_empty:
            topic.found(topology)
        elif is_first and topic.is_sought:  # a producer need not wait: it takes any nsqd for a topic that none has
            topic.missing(monotonic(), current.chance)
        is_wanted = self._topics.get(topic.name) is topic and self._poller is getcurrent()
        if self._listener is not None and is_wanted:
            self._listener(topic.name, topology)

    def _ask(self, lookupd: Lookupd, current: LookupRound) -> None:
        """In a greenlet for each lookupd."""
        try:
            try:
                errors = current.ask(lookupd, self._supervisor)  # blocks: others count meanwhile
                self.errors += errors
            finally:
                current.pending -= 1
                self._wake.set()
            # It has named other lookupds: they are asked now, not in a poll interval.
            if self._lookupds.grow(lookupd):
                _ask_now(self._topics.values(), self._wake)
        finally:
            lookupd.close()
            lookupd.is_busy = False
            self._wake.set()


def _ask_now(topics: Iterable[PolledTopic], wake: Event) -> None:
    """Others are asked than before: what they know is wanted now, not in a poll interval."""
    for topic in topics:
        topic.due = monotonic()
    wake.set()


def _pause(rounds: Iterable[LookupRound], lookupds: LookupdList, topics: Iterable[PolledTopic]) -> float | None:
    """Seconds until there is something to do without being woken; None when there is nothing.

    With every lookupd busy no round can start: the one that gets free wakes the loop.
    """
    now = monotonic()
    moments = [current.started_at + STRAGGLER_GRACE for current in rounds if now - current.started_at < STRAGGLER_GRACE]
    if lookupds.free(now):
        moments.extend(topic.due for topic in topics)
    return max(0.0, min(moments) - now) if moments else None
