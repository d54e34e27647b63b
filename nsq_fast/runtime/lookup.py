"""Polling of the lookup services: where do my topics live, now?

One greenlet polls. In each round every lookupd is asked at once, each request
under a total timeout, and the good answers are merged into one `Topology` a
topic. Bad answers are ignored and logged when a lookupd begins to fail, not at
every poll; one that keeps failing is asked less often until it answers again.
A round that waits for a slow lookupd publishes what the others said, and does
not hold up the next round. When all of them fail, what was known stays, and
rounds come quicker; so they do for a consumer's topic that nobody knows yet.
The list of lookupds grows by what they say of each other.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, cast

from gevent import getcurrent, joinall, killall, sleep
from gevent.event import Event

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, HttpError, LookupFailed, NotRunning, NsqError
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT, check_topic
from nsq_fast.protocol.topology import LookupAnswer, Nsqd, Topology, distinct, merge

from .lookupd import Lookupd
from .net.http import Endpoint, parse_endpoint
from .owner_thread import OwnerThread
from .supervised import Job, Loop, Supervisor

Access = Literal["r", "w"]
Listener = Callable[[str, Topology], None]

MAX_LOOKUPDS = 64
"""Most lookupds that are asked, the ones learnt from others included."""

_STRAGGLER_GRACE = 0.25
_BURST = 0.1
_FIRST_RETRY = 0.5
# A topic that no lookupd knows yet is asked for after these seconds, doubled each time.
_FIRST_SEARCH = 0.2
_LONGEST_SEARCH = 5.0
_STOP_TIMEOUT = 1.0
_TOPICS_A_TURN = 100

log = logging.getLogger("nsq_fast.lookup")


class _Topic:
    """A topic that is polled for.

    Attributes:
        due, asked_at: monotonic times.
        searches: rounds in which no lookupd knew it, one after the other.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.topology: Topology | None = None
        self._agreed: LookupAnswer | None = None
        self.ready = Event()
        self.asked_at = float("-inf")
        self.due = 0.0
        self.failures = 0
        self.searches = 0
        self.round_number = 0

    def learn(self, answers: list[LookupAnswer]) -> Topology:
        """Unite the answers of one round. The topology is the same object while nothing has changed."""
        first = answers[0]
        is_agreed = all(answer == first for answer in answers)
        if self.topology is None or not is_agreed or first != self._agreed:
            self._agreed = first if is_agreed else None
            merged = merge(answers)
            if self.topology is None or merged != self.topology:
                self.topology = merged
        return self.topology


class _Failure(NamedTuple):
    """Why a lookupd gave no answer. Not the exception: its traceback would keep a huge reply alive."""

    text: str
    is_silence: bool


class _Round:
    """One question to all lookupds at once, about some topics."""

    def __init__(self, number: int, topics: list[_Topic], started_at: float) -> None:
        self.number = number
        self.topics = topics
        self.started_at = started_at
        self.pending = 0
        self.answers: dict[_Topic, list[LookupAnswer]] = {}
        self.published: dict[_Topic, int] = {}


class LookupPoller:
    """Keeps the topology of some topics up to date.

    Args:
        lookupds: ``host``, ``host:port``, ``http://...``, ``https://...`` or (host, port) pairs; a string may
            hold several, separated by commas. Default port 4161.
        config: intervals, timeout, Authorization header.
        access: ``"r"`` for consumers, ``"w"`` for producers. Original lookupds ignore it.
        listener: called as ``listener(topic, topology)`` in the poller's greenlet after each round that at least
            one lookupd answered, whether something changed or not. It should not block.
        supervisor: of the owner; it hears of faults in our greenlets.

    Raises ConfigError for an address that cannot be used.
    """

    def __init__(
        self,
        lookupds: str | Iterable[str | tuple[str, int]],
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
        self._access = access
        self._listener = listener
        self._thread = OwnerThread()
        self._supervisor = supervisor or Supervisor(log)
        self._seeds = _parse_lookupds(lookupds)
        self._listings: dict[Endpoint, tuple[Endpoint, ...]] = {}
        self._lookupds = {endpoint: self._lookupd(endpoint) for endpoint in self._seeds}
        self._topics: dict[str, _Topic] = {}
        self._rounds: list[_Round] = []
        self._round_number = 0
        self._wake = Event()
        self._poller: Loop | None = None
        self._jobs: set[Job] = set()
        self._nodes_job: Job | None = None
        self._nodes: tuple[Nsqd, ...] = ()
        self._nodes_at = float("-inf")

    @property
    def lookupds(self) -> tuple[str, ...]:
        """URLs of the lookupds that are asked: the configured ones, and those learnt from them."""
        return tuple(str(endpoint) for endpoint in self._lookupds)

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
        for topic in self._topics.values():
            topic.due = 0.0
            if topic.topology is None:
                topic.ready.clear()
        self._poller = self._supervisor.loop("nsq_fast lookup", self._poll_loop)
        self._poller.start()

    def stop(self) -> None:
        """End polling and give up requests under way. Returns soon; may be called from the listener."""
        self._thread.check("LookupPoller.stop()")
        poller, self._poller = self._poller, None
        if poller is None:
            return
        self._wake.set()
        self._rounds.clear()
        jobs = [job for job in self._jobs if job is not getcurrent()]
        self._jobs.clear()
        killall(jobs, block=False)
        for lookupd in self._lookupds.values():
            lookupd.is_busy = False  # a job that was killed before it began cannot say so itself
        for topic in self._topics.values():
            topic.ready.set()
        if poller is not getcurrent():
            poller.join(_STOP_TIMEOUT)

    def add_topic(self, topic: str) -> None:
        """Poll for ``topic`` too; a running poller asks for it at once. Raises NameInvalid."""
        self._thread.check("LookupPoller.add_topic()")
        if topic not in self._topics:
            self._topics[check_topic(topic)] = _Topic(topic)
            self._wake.set()

    def remove_topic(self, topic: str) -> None:
        """Forget ``topic``."""
        self._thread.check("LookupPoller.remove_topic()")
        removed = self._topics.pop(topic, None)
        if removed is not None:
            removed.ready.set()

    def refresh(self, topic: str | None = None) -> None:
        """Ask again soon, for one topic or for all: what is known proved stale.

        Never blocks. Calls that come in one burst are one round, and there is one round each
        ``lookupd_refresh_interval`` at most; a call that comes too early is served late, not lost.
        """
        self._thread.check("LookupPoller.refresh()")
        if topic is not None:
            self.add_topic(topic)
        now = time.monotonic()
        for known in [self._topics[topic]] if topic is not None else list(self._topics.values()):
            if now - known.asked_at >= _BURST:
                known.due = min(known.due, max(now, known.asked_at + self._config.lookupd_refresh_interval))
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
            raise LookupFailed(f"no lookupd answered for topic {topic!r}: {self._last_errors()}")
        return known.topology

    def nodes(self, timeout: float | None = None) -> tuple[Nsqd, ...]:
        """Ask for every nsqd the lookupds know, whatever its topics: original nsqds create topics on publish.

        Callers share one question, and its answer for ``lookupd_refresh_interval``. Raises LookupFailed when no
        lookupd answers, or ``timeout`` seconds pass.
        """
        self._thread.check("LookupPoller.nodes()")
        if time.monotonic() - self._nodes_at < self._config.lookupd_refresh_interval:
            return self._nodes
        if self._nodes_job is None or self._nodes_job.ready():
            self._nodes_job = self._spawn(self._ask_nodes)
        self._nodes_job.join(timeout)
        found = self._nodes_job.value
        if not isinstance(found, tuple):  # too late, killed by stop, or nobody answered
            raise LookupFailed(f"no lookupd answered for the list of nsqds: {self._last_errors()}")
        return cast("tuple[Nsqd, ...]", found)

    def failure(self) -> str:
        """Why lookupds did not answer the last time; empty when all did."""
        return "; ".join(lookupd.last_error for lookupd in self._lookupds.values() if lookupd.last_error)

    # The poller's greenlet

    def _poll_loop(self) -> None:
        me = getcurrent()
        while self._poller is me:
            self._wake.clear()
            self._start_round()
            self._publish_rounds()
            pause = self._pause()
            if self._poller is me:
                self._wake.wait(pause)

    def _start_round(self) -> None:
        now = time.monotonic()
        topics = [topic for topic in self._topics.values() if topic.due <= now]
        lookupds = self._free_lookupds(now)
        if not topics or not lookupds:
            return
        self._round_number += 1
        current = _Round(self._round_number, topics, now)
        self._rounds.append(current)
        for topic in topics:
            topic.asked_at = now
            topic.due = now + self._jittered(self._config.lookupd_poll_interval)
        for lookupd in lookupds:
            lookupd.is_busy = True
            current.pending += 1
            self._spawn(self._ask, lookupd, current)

    def _free_lookupds(self, now: float) -> list[Lookupd]:
        """Whom to ask: those that work and those whose turn to be tried it is; all of them when none works."""
        known = list(self._lookupds.values())
        if any(lookupd.failures == 0 for lookupd in known):
            known = [lookupd for lookupd in known if lookupd.is_preferred(now)]
        return [lookupd for lookupd in known if not lookupd.is_busy]

    def _publish_rounds(self) -> None:
        now = time.monotonic()
        for current in list(self._rounds):
            if current.pending == 0 or now - current.started_at >= _STRAGGLER_GRACE:
                self._publish(current)
            if current.pending == 0 and current in self._rounds:
                self._rounds.remove(current)
                self._retry_unanswered(current, now)

    def _publish(self, current: _Round) -> None:
        for number, (topic, answers) in enumerate(list(current.answers.items()), 1):
            if len(answers) == current.published.get(topic, 0) or topic.round_number > current.number:
                continue
            is_first = topic not in current.published
            current.published[topic] = len(answers)
            topic.round_number = current.number
            topic.failures = 0
            merged = topic.learn(answers)
            topic.ready.set()
            self._notify(topic)
            if number % _TOPICS_A_TURN == 0:
                sleep(0)  # thousands of topics must not hold the hub up
            if not merged.is_empty:
                self._found(topic, merged)
            elif is_first and self._access == "r" and self._listener is not None:
                self._search(topic)

    def _search(self, topic: _Topic) -> None:
        """Ask a consumer's lookupds again soon: the first message of the topic may come at any moment.

        A producer does not wait for that: it takes any nsqd for a topic that none has.
        """
        if not topic.searches:
            log.warning("no nsqlookupd knows topic %s yet; asking again until one does", topic.name)
        delay = min(_FIRST_SEARCH * 2 ** min(topic.searches, 16), _LONGEST_SEARCH)
        topic.searches += 1
        topic.due = min(topic.due, time.monotonic() + self._jittered(delay))

    def _found(self, topic: _Topic, topology: Topology) -> None:
        if topic.searches:
            topic.searches = 0
            nsqds = topology.nsqds
            log.warning("topic %s is known now: %d nsqds, first %s", topic.name, len(nsqds), nsqds[0].tcp)

    def _notify(self, topic: _Topic) -> None:
        is_wanted = self._topics.get(topic.name) is topic and self._poller is getcurrent()
        if self._listener is None or topic.topology is None or not is_wanted:
            return
        try:
            self._listener(topic.name, topic.topology)
        except Exception:
            log.exception("the listener failed on the topology of %s", topic.name)

    def _retry_unanswered(self, current: _Round, now: float) -> None:
        for topic in current.topics:
            if topic not in current.answers:
                if not topic.failures:
                    log.warning("no lookupd answers for topic %s; what was known of it is kept", topic.name)
                topic.failures += 1
                delay = min(_FIRST_RETRY * 2 ** min(topic.failures - 1, 16), self._config.lookupd_poll_interval)
                topic.due = min(topic.due, now + self._jittered(delay))

    def _pause(self) -> float | None:
        """Seconds until there is something to do without being woken; None when there is nothing.

        With every lookupd busy no round can start: the one that gets free wakes the loop.
        """
        now = time.monotonic()
        moments = [
            current.started_at + _STRAGGLER_GRACE
            for current in self._rounds
            if now - current.started_at < _STRAGGLER_GRACE
        ]
        if self._free_lookupds(now):
            moments.extend(topic.due for topic in self._topics.values())
        return max(0.0, min(moments) - now) if moments else None

    def _jittered(self, seconds: float) -> float:
        return seconds * (1.0 + self._config.lookupd_poll_jitter * random.random())

    # One greenlet for each lookupd that is asked

    def _spawn(self, function: Callable[..., object], *args: object) -> Job:
        job = self._supervisor.job(f"nsq_fast lookup {function.__name__}", function, *args)
        self._jobs.add(job)
        job.rawlink(self._jobs.discard)
        job.start()
        return job

    def _ask(self, lookupd: Lookupd, current: _Round) -> None:
        try:
            try:
                self._ask_topics(lookupd, current)
            finally:
                current.pending -= 1
                self._wake.set()
            self._grow(lookupd)
        finally:
            lookupd.close()
            lookupd.is_busy = False
            self._wake.set()

    def _ask_topics(self, lookupd: Lookupd, current: _Round) -> None:
        """Ask topic by topic: one that the lookupd chokes on says nothing of the others, silence does."""
        failure: _Failure | None = None
        has_answered = False
        for topic in current.topics:
            answer = _answer_of(lookupd, topic.name)
            if isinstance(answer, LookupAnswer):
                has_answered = True
                current.answers.setdefault(topic, []).append(answer)
                continue
            failure = answer
            if failure.is_silence:
                break
        if has_answered or failure is None:
            lookupd.succeeded()
        else:
            lookupd.failed(failure.text, time.monotonic())

    def _grow(self, lookupd: Lookupd) -> None:
        """Learn of other lookupds from one that works."""
        addresses = lookupd.list_lookupds(time.monotonic()) if lookupd.failures == 0 else None
        if addresses is None:
            return
        self._listings[lookupd.endpoint] = tuple(Endpoint(lookupd.endpoint.scheme, each) for each in addresses)
        listed = (endpoint for listing in self._listings.values() for endpoint in listing)
        wanted = list(dict.fromkeys([*self._seeds, *listed]))[: max(MAX_LOOKUPDS, len(self._seeds))]
        new = [endpoint for endpoint in wanted if endpoint not in self._lookupds]
        self._lookupds = {endpoint: self._lookupds.get(endpoint) or self._lookupd(endpoint) for endpoint in wanted}
        self._listings = {source: listing for source, listing in self._listings.items() if source in self._lookupds}
        if new:
            log.info("learnt of lookupds %s from %s", ", ".join(map(str, new)), lookupd.endpoint)
            for topic in self._topics.values():
                topic.due = time.monotonic()

    def _lookupd(self, endpoint: Endpoint) -> Lookupd:
        return Lookupd(endpoint, self._config, self._access)

    def _ask_nodes(self) -> tuple[Nsqd, ...] | None:
        known = list(self._lookupds.values())
        working = [lookupd for lookupd in known if lookupd.failures == 0] or known
        jobs = [self._spawn(_nodes_of, lookupd) for lookupd in working]
        joinall(jobs, timeout=_STRAGGLER_GRACE)
        good = _results(jobs)
        if not good:
            joinall(jobs)
            good = _results(jobs)
        if not good:
            return None
        self._nodes = distinct(nsqd for answer in good for nsqd in answer)
        self._nodes_at = time.monotonic()
        return self._nodes

    def _last_errors(self) -> str:
        return self.failure() or "no reply yet"


def _answer_of(lookupd: Lookupd, topic: str) -> LookupAnswer | _Failure:
    try:
        return lookupd.lookup(topic)
    except NsqError as error:
        return _Failure(str(error), isinstance(error, HttpError) and error.status is None)
    except Exception as error:  # a fault of ours must not end discovery for good
        log.exception("lookup of %s at %s failed", topic, lookupd.endpoint)
        return _Failure(repr(error), False)


def _nodes_of(lookupd: Lookupd) -> tuple[Nsqd, ...] | None:
    try:
        return lookupd.nodes()
    except NsqError as error:
        lookupd.last_error = str(error)
        return None
    finally:
        lookupd.close()


def _results(jobs: list[Job]) -> list[tuple[Nsqd, ...]]:
    """What the jobs that are done returned; those that failed or were killed left no tuple."""
    return [job.value for job in jobs if isinstance(job.value, tuple)]


def _parse_lookupds(lookupds: str | Iterable[str | tuple[str, int]]) -> tuple[Endpoint, ...]:
    if isinstance(lookupds, str):
        lookupds = [part for part in lookupds.split(",") if part.strip()]
    elif not isinstance(lookupds, Iterable):
        raise ConfigError(f"lookupd addresses must be a string or a list of them, not {lookupds!r}")
    found = tuple(dict.fromkeys(parse_endpoint(each, DEFAULT_LOOKUPD_HTTP_PORT) for each in lookupds))
    if not found:
        raise ConfigError("no lookupd address is given")
    return found
