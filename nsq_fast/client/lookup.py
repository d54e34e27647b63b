"""Where topics live: all nsqlookupds asked again and again, on either loop.

In a round every lookupd that owes no answer is asked about every topic that is due: all lookupds at once, and each
about some topics at a time. What one of them says is used at once, so that one that is slow or hangs delays nothing
that another knows. Its part is played meanwhile by what it said the last time, which adds nsqds and takes none away.
Only that nobody knows a topic is concluded late: when all have answered, or after ``STRAGGLER_GRACE``.

    asked ──► first answer that names an nsqd ──► further answers that change something ──► all have answered
                told at once                        told at once                             what is left is concluded
      │
      ├─► nobody names one, all have answered or the grace is over ─► told as empty; a consumer's topic is sought
      └─► nobody has answered ─► what was known stays, the next question comes sooner

Bad answers are ignored and logged when a lookupd begins to fail, not at every poll. One that keeps failing is asked at
every second, fourth, then eighth poll only, until it answers again. Answers and how they are united are
``protocol.topology``'s.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.config import LookupConfig
from nsq_fast.errors import (
    ConfigError,
    HttpError,
    LookupFailed,
    NotRunning,
    NsqError,
    RemoteProtocolError,
    counted,
    printable,
)
from nsq_fast.log_events import (
    DISCOVERY_EXCLUDED,
    DISCOVERY_FAILED,
    LOOKUP_UNANSWERED,
    LOOKUPD_FAILED,
    LOOKUPD_RECOVERED,
    LOOKUPDS_LEARNT,
    OPTION_IDLE,
    TOPIC_FOUND,
    TOPIC_UNKNOWN,
    TOPICS_UNKNOWN,
)
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT, Addresses, check_topic, listed, naming
from nsq_fast.protocol.rdy import grown
from nsq_fast.protocol.topology import (
    ACCEPT,
    Keep,
    LookupAnswer,
    Nsqd,
    Topology,
    distinct,
    is_unknown_topic,
    keep_of,
    left_out,
    merge,
    only,
    parse_listlookup,
    parse_lookup,
    parse_nodes,
    parse_topics,
    unknown_topic,
)

from .http import Endpoint, HttpClient, parse_endpoint
from .loop import Changes, Event

if TYPE_CHECKING:
    from nsq_fast.names import Address
    from nsq_fast.protocol.topology import TopicChoice

    from .loop import Loop, Owner, Supervisor, Task

Access = Literal["r", "w"]
Listener = Callable[[str, Topology], object]

STRAGGLER_GRACE = 0.25
"""Seconds after which nobody waits for a slow lookupd before it is concluded that others name no nsqd."""

SIDE_BY_SIDE = 50
"""Questions of a client that are under way at once, shared evenly by its lookupds: a hung one blocks its share only."""

PATIENCE = 0.005
"""Seconds. A lookupd that answers less than one question for each connection meanwhile is asked over more of them."""

BURST = 0.1
"""Calls of ``refresh`` within so many seconds are one."""

FIRST_RETRY = 0.5
"""Seconds until a topic of which no lookupd said anything is asked for again: doubled each time, up to a poll; up to
``LONGEST_SEARCH`` where no nsqd of it is known, as in a program that is started before the nsqlookupds are up."""

FIRST_SEARCH = 0.2
FIRST_LISTING = 0.5
LONGEST_SEARCH = 5.0
"""Seconds until a topic that nobody knows is asked for again, or a listing in which nothing matches a pattern: doubled
each time, up to the longest."""

_TOPICS_A_TURN = 100

# The nsqlookupds: what can be asked of one, how it has been doing, and which there are. The list grows by what they say
# of each other.

MAX_LOOKUPDS = 64
"""Most lookupds that are asked, the ones learnt from others included."""

MAX_SKIPPED_POLLS = 8

_MAX_REPLY_SIZE = 8 * 1024 * 1024
# Of an answer about one topic: what JSON takes for an nsqd at most, and for the names of channels. It is decoded in one
# piece, and so holds the loop up for 10 ms a megabyte.
_PRODUCER_SIZE = 2 * 1024
_CHANNELS_SIZE = 256 * 1024

log: logging.Logger = get_logger("nsq_fast.lookup")


class Lookupd:
    """A lookup service: what can be asked of it, and how it has been doing.

    One that keeps failing is asked at every second, fourth, then eighth poll only, as long as others work.
    The methods that ask it raise HttpError or RemoteProtocolError.

    Attributes:
        failures: rounds one after the other in which it gave no good answer.
        is_busy: whether it still owes answers of a round.
        skipped: topics that others were asked about meanwhile.
        retry_at: before that it is not asked as long as others work.
        last_error: why the last question had no good answer; empty when it had one.
    """

    def __init__(self, endpoint: Endpoint, config: LookupConfig, access: str) -> None:
        self.endpoint = endpoint
        self.failures: int = 0
        self.is_busy = False
        self.skipped: dict[PolledTopic, None] = {}
        self.retry_at: float = 0.0
        self.last_error: str = ""
        self._access = access
        self._config = config
        self._is_clustered = self._is_listing_bad = False
        self._list_at = 0.0
        headers = {"Accept": ACCEPT}
        if config.lookupd_authorization:
            headers["Authorization"] = config.lookupd_authorization
        self._http = HttpClient(
            endpoint,
            timeout=config.lookupd_timeout,
            headers=headers,
            tls_options=config.lookupd_tls_options,
            max_reply_size=_MAX_REPLY_SIZE,
        )

    async def lookup(self, loop: Loop, topic: str) -> LookupAnswer:
        """Ask where ``topic`` lives; the empty answer, with its problem, when it does not know it."""
        # youzan/nsq: nsqlookupd/http.go, doLookup; the original ignores all but the topic
        query = {"topic": topic, "access": self._access, "metainfo": "true"}
        size = min(_CHANNELS_SIZE + self._config.lookupd_max_producers * _PRODUCER_SIZE, _MAX_REPLY_SIZE)
        try:
            reply = await self._http.ask(loop, "GET", "/lookup", query, max_reply_size=size)
            answer = parse_lookup(reply.body, self._config.lookupd_max_producers)
        except HttpError as error:
            if error.status == 404 and error.text == "NOT_FOUND":  # nsqio/nsq: internal/http_api, NotFound
                text = f"{error}: this is no nsqlookupd, but perhaps the HTTP port of an nsqd"
                raise RemoteProtocolError(text) from None
            if not is_unknown_topic(error.status, error.text):
                raise
            answer = unknown_topic(printable(error.text))
        self._is_clustered = answer.is_redesigned
        return answer

    async def nodes(self, loop: Loop) -> tuple[Nsqd, ...]:
        return parse_nodes((await self._http.ask(loop, "GET", "/nodes")).body, self._config.lookupd_max_producers)

    async def topics(self, loop: Loop) -> tuple[str, ...]:
        # nsqio/nsq: nsqlookupd/http.go, doTopics; youzan/nsq: the same
        return parse_topics((await self._http.ask(loop, "GET", "/topics")).body)

    async def list_lookupds(self, loop: Loop) -> tuple[Address, ...] | None:
        """Ask for the lookupds of its cluster, once a poll interval; None when it was not asked, or does not know.

        Those of the original NSQ know of no others: only one whose last answer was of the redesigned NSQ is asked.
        """
        now = monotonic()
        if now < self._list_at or not self._is_clustered:
            return None
        self._list_at = now + self._config.lookupd_poll_interval
        try:
            return parse_listlookup((await self._http.ask(loop, "GET", "/listlookup")).body)
        except NsqError as error:
            if not self._is_listing_bad:
                self._is_listing_bad = True
                text = "lookupd %s does not list the lookupds of its cluster: %s"
                log.warning(text, self.endpoint, error, extra=LOOKUPD_FAILED)
            return None

    def succeeded(self) -> None:
        if self.failures:
            text = "lookupd %s answers again after %d failures"
            log.info(text, self.endpoint, self.failures, extra=LOOKUPD_RECOVERED)
        self.failures = 0
        self.retry_at = 0.0
        self.last_error = ""

    def failed_for(self, reason: str) -> None:
        if not self.failures:
            log.warning("lookupd %s fails: %s", self.endpoint, reason, extra=LOOKUPD_FAILED)
        self.last_error = reason
        self.failures += 1
        # Half an interval less: jitter must not make it miss the poll that is meant, a refresh in between must.
        polls = grown(1.0, 2.0, self.failures - 1, MAX_SKIPPED_POLLS)
        self.retry_at = monotonic() + self._config.lookupd_poll_interval * (polls - 0.5)

    def close(self) -> None:
        self._http.close()


class LookupdList:
    """The lookupds that are asked: configured ones, those the program adds, and those that they name themselves.

    What they name are the other members of their cluster.
    """

    def __init__(self, lookupds: Addresses, config: LookupConfig, access: str) -> None:
        self._config = config
        self._access = access
        with naming("lookupd_http_addresses"):
            self._configured = parse_lookupds(listed(lookupds, "lookupd addresses"))
        if not self._configured:
            raise ConfigError("no lookupd address is given")
        if config.lookupd_tls_options and all(each.scheme == "http" for each in self._configured):
            log.warning(
                "lookupd_tls_options has no effect: nsqlookupds are asked without TLS where their addresses do not"
                " begin with https://, as %s", ", ".join(map(str, self._configured)), extra=OPTION_IDLE,
            )  # fmt: skip
        self._added: tuple[Endpoint, ...] = ()
        self._removed: frozenset[Endpoint] = frozenset()
        self._listings: dict[Endpoint, tuple[Endpoint, ...]] = {}
        self._known: dict[Endpoint, Lookupd] = {}
        self._rebuild()

    def __iter__(self) -> Iterator[Lookupd]:
        return iter(list(self._known.values()))

    def free(self, now: float) -> list[Lookupd]:
        """Whom to ask: those that work and those whose turn to be tried it is; all of them when none works."""
        is_any_good = any(lookupd.failures == 0 for lookupd in self)
        return [each for each in self if not each.is_busy and (now >= each.retry_at or not is_any_good)]

    async def grow(self, loop: Loop, lookupd: Lookupd) -> bool:
        """Ask a lookupd that works which others there are; whether any is new."""
        addresses = await lookupd.list_lookupds(loop) if lookupd.failures == 0 else None
        if addresses is None:
            return False
        self._listings[lookupd.endpoint] = tuple(Endpoint(lookupd.endpoint.scheme, each) for each in addresses)
        new = self._rebuild()
        if new:
            log.info("learnt of lookupds %s from %s", ", ".join(map(str, new)), lookupd.endpoint, extra=LOOKUPDS_LEARNT)
        return bool(new)

    def change(self, added: tuple[Endpoint, ...], removed: frozenset[Endpoint]) -> bool:
        """Ask ``added``, too, and never ``removed``, whoever names them; whether that changes who is asked."""
        before = set(self._known)
        self._added, self._removed = added, removed
        self._rebuild()
        return set(self._known) != before

    def _rebuild(self) -> list[Endpoint]:
        """Put together whom to ask, from all who name lookupds; returns those that were not asked before."""
        seeds = list(dict.fromkeys([*self._configured, *self._added]))
        listed = (endpoint for listing in self._listings.values() for endpoint in listing)
        wanted = list(dict.fromkeys([*seeds, *listed]))[: max(MAX_LOOKUPDS, len(seeds))]
        wanted = [endpoint for endpoint in wanted if endpoint not in self._removed]
        new = [endpoint for endpoint in wanted if endpoint not in self._known]
        self._known = {
            endpoint: self._known.get(endpoint) or Lookupd(endpoint, self._config, self._access) for endpoint in wanted
        }
        self._listings = {source: listing for source, listing in self._listings.items() if source in self._known}
        return new


def parse_lookupds(lookupds: Iterable[Any]) -> tuple[Endpoint, ...]:
    """Addresses of lookupds, without repeats. Raises ConfigError."""
    return tuple(dict.fromkeys(parse_endpoint(each, DEFAULT_LOOKUPD_HTTP_PORT) for each in lookupds))


def jittered(seconds: float, config: LookupConfig, chance: float) -> float:
    """A pause that is longer by what chance, in [0, 1), makes of ``lookupd_poll_jitter``: clients do not ask together.

    It is drawn once for a round of questions: topics of one client are to be asked about together.
    """
    return seconds * (1.0 + config.lookupd_poll_jitter * chance)


class PolledTopic:
    """A topic that is polled for.

    Args:
        keep: the nsqds that are used, of those that lookup names; None: all.

    Attributes:
        is_sought: whether it is asked for more often as long as nobody knows it.
        asked_at, due: times of the last question and the next one.
        failures, searches: rounds one after the other that nobody answered, and in which nobody knew it.
        topology: what is known of it; None before there was a good answer.
        answers: the last word of each lookupd that counts now, and the number of the round it is of.
        round_number: of the latest round; ``answer_asked_at``: when that began of which ``topology`` is the answer.
        is_partial: whether that left out lookupds that were busy.
        open: how many lookupds owe an answer of that round; ``is_late``: they are not waited for any longer.
        is_answered, is_told: whether there was an answer since it began, and the listener was told of one.
        is_missed: whether it was concluded from that round that nobody knows it.
        is_settled: whether a round has been concluded.
    """

    failures: int = 0
    searches: int = 0
    round_number: int = 0
    open: int = 0
    is_late: bool = False
    is_answered: bool = False
    is_told: bool = False
    is_missed: bool = False

    def __init__(self, name: str, config: LookupConfig, keep: Keep | None = None, is_sought: bool = True) -> None:
        self.name = name
        self.is_sought = is_sought
        self.asked_at: float = float("-inf")
        self.due: float = 0.0
        self.topology: Topology | None = None
        self.answers: dict[Lookupd, tuple[int, LookupAnswer]] = {}
        self.is_partial: bool = False
        self.answer_asked_at: float = float("-inf")
        self.is_settled = False
        self._config = config
        self._keep = keep
        self._agreed: LookupAnswer | None = None
        self._named: Topology | None = None
        self._is_filter_bad = False

    def begin(self, number: int, now: float, due: float, count: int, counted: set[Lookupd]) -> None:
        """A round asks ``count`` lookupds about it now, the next one at ``due``, unless something makes that sooner.

        Of ``counted``, who owe an answer now, the last word holds until they give it.
        """
        self.asked_at, self.due = now, due
        self.round_number, self.open = number, count
        self.is_late = self.is_answered = self.is_told = self.is_missed = False
        self.is_partial = count < len(counted)
        self.answers = {lookupd: word for lookupd, word in self.answers.items() if lookupd in counted}

    def refresh(self, now: float, later: float = 0.0) -> bool:
        """Make it due soon, or in ``later`` seconds; False when that changes nothing.

        It does not when a question about it has just been sent, or is due sooner.
        """
        if now - self.asked_at < BURST:
            return False
        due = max(now + later, self.asked_at + self._config.lookupd_refresh_interval)
        is_sooner = due < self.due or not later
        self.due = min(self.due, due)
        return is_sooner

    def catch_up(self, due: float) -> None:
        """A lookupd that was busy when it was asked about is free, and may know what no other does."""
        if self.topology is None or self.topology.is_empty:
            self.due = min(self.due, due)

    def _hurry(self, delay: float, chance: float) -> None:
        self.due = min(self.due, monotonic() + jittered(delay, self._config, chance))

    def heard(self, number: int, lookupd: Lookupd, answer: LookupAnswer | None) -> None:
        """A lookupd has answered what it was asked in that round, or will not."""
        if number == self.round_number:
            self.open -= 1
        if answer is None:
            self.answers.pop(lookupd, None)
        else:
            self.answers[lookupd] = number, answer
            self.is_answered = True

    @property
    def is_concluded(self) -> bool:
        """Whether what is known now is all that this round will tell, or all that is waited for."""
        return self.is_late or not self.open

    def unite(self) -> Topology:
        """What the words that count say together: the same object while nothing has changed."""
        words = self.answers.values()
        newest = max(number for number, _ in words)
        first = next(iter(words))[1]
        is_agreed = all(answer == first for _, answer in words)
        if self._named is None or not is_agreed or first != self._agreed:
            self._agreed = first if is_agreed else None
            fresh = [answer for number, answer in words if number == newest]
            self._named = merge(fresh, [answer for number, answer in words if number != newest])
        found = self._named if self._keep is None else self._filtered(self._named, self._keep)
        return self.topology if self.topology == found else found

    def take(self, found: Topology, asked_at: float) -> None:
        self.failures = 0
        self.answer_asked_at = max(self.answer_asked_at, asked_at)
        if found is not self.topology:
            self._tell_excluded(found)
            self.topology = found

    def _tell_excluded(self, found: Topology) -> None:
        """Log which partitions are left out: nobody may be aware of it. That none is left is said elsewhere."""
        partitions, known = found.excluded_partitions, self.topology
        if partitions and not found.is_empty and (known is None or partitions != known.excluded_partitions):
            log.warning("topic %s: %s", self.name, left_out(partitions), extra=DISCOVERY_EXCLUDED)

    def _filtered(self, named: Topology, keep: Keep) -> Topology:
        """What the filter leaves. One that raises leaves what was known before: nothing at first."""
        try:
            found = only(named, keep)
        except Exception as error:  # a user's function
            if not self._is_filter_bad:
                text = "discovery_filter failed for topic %s; what was known of it is kept"
                log.exception(text, self.name, extra=DISCOVERY_FAILED)
            self._is_filter_bad = True
            problem = f"discovery_filter failed: {printable(repr(error))}"
            return self.topology or Topology(problem=problem, excluded=named.nsqds)
        self._is_filter_bad = False
        return found

    def unanswered(self, chance: float) -> None:
        """No lookupd answered: what is known stays, and the next question comes sooner."""
        if not self.failures:
            text = "no lookupd answers for topic %s; what was known of it is kept"
            log.warning(text, self.name, extra=LOOKUP_UNANSWERED)
        is_found = self.topology is not None and not self.topology.is_empty
        longest = self._config.lookupd_poll_interval if is_found else LONGEST_SEARCH
        self._hurry(grown(FIRST_RETRY, 2.0, self.failures, longest), chance)
        self.failures += 1

    def missing(self, chance: float) -> None:
        """No lookupd names an nsqd for it, and its first message may come at any moment: ask again soon.

        Once a round: answers that come late conclude it again. And not by ``is_told``, which is set as well where the
        last word of a lookupd that had not answered yet still named an nsqd.
        """
        if self.is_missed:
            return
        self.is_missed = True
        if not self.searches:
            if self.topology is not None and self.topology.excluded:
                text = "topic %s: %s; asking again until one is left"
                log.warning(text, self.name, self.topology.problem, extra=DISCOVERY_EXCLUDED)
            else:
                text = "no nsqlookupd knows topic %s yet; asking again until one does"
                log.warning(text, self.name, extra=TOPIC_UNKNOWN)
        self._hurry(grown(FIRST_SEARCH, 2.0, self.searches, LONGEST_SEARCH), chance)
        self.searches += 1

    def found(self, topology: Topology) -> None:
        if self.searches:
            self.searches = 0
            nsqds, text = topology.nsqds, "topic %s is known now: %s, first %s"
            log.warning(text, self.name, counted(len(nsqds), "nsqd"), nsqds[0].tcp, extra=TOPIC_FOUND)


class TopicListing(msgspec.Struct, frozen=True):
    """Names of topics, and whether every lookupd has said which it knows: then there are no others."""

    names: frozenset[str]
    is_whole: bool


class LookupPoller:
    """Keeps the topology of some topics up to date.

    Args:
        lookupds: ``host``, ``host:port``, ``http://...``, ``https://...`` or (host, port) pairs; a string may
            hold several, separated by commas. Default port 4161.
        config: intervals, timeout, Authorization header.
        access: ``"r"`` for consumers, ``"w"`` for producers. Original lookupds ignore it.
        listener: called as ``listener(topic, topology)`` in a turn of the loop: once in each round that a lookupd
            answered, and whenever what is known has changed. It must not block, and may call ``stop``.

    Attributes:
        errors: questions that a lookupd gave no good answer to, since the start.

    Raises ConfigError for an address that cannot be used.
    """

    def __init__(
        self,
        lookupds: Addresses,
        config: LookupConfig | None = None,
        access: Access = "r",
        listener: Listener | None = None,
    ) -> None:
        if access not in ("r", "w"):
            raise ConfigError(f"access={access!r}: must be 'r' or 'w'")
        if config is not None and not isinstance(config, LookupConfig):
            raise ConfigError(f"config={config!r}: must be a LookupConfig, or None")
        if listener is not None and not callable(listener):
            raise ConfigError(f"listener={listener!r}: must be callable, or None")
        self.errors: int = 0
        self._config = config or LookupConfig()
        self._keep = keep_of(self._config.discovery_filter)
        self._searches = access == "r" and listener is not None
        self._listener = listener
        self._lookupds = LookupdList(lookupds, self._config, access)
        self._topics: dict[str, PolledTopic] = {}
        self._round_number = 0
        self._chance = 0.0  # in [0, 1): lengthens the pauses of all topics of a round alike, so that they stay together
        self._next_poll = 0.0  # one time for all topics, those that were asked about in between as well
        self._life: object = None
        self._loop: Loop = cast("Loop", None)
        self._owner: Owner | None = None
        self._supervisor: Supervisor = cast("Supervisor", None)
        self._wake: Event = cast("Event", None)
        self._tasks: dict[Task, None] = {}  # in their order, as what they wake
        self._told: Changes = cast("Changes", None)
        self._asks_nodes: Task | None = None
        self._nodes: tuple[Nsqd, ...] = ()
        self._nodes_asked_at = float("-inf")

    @property
    def lookupds(self) -> tuple[str, ...]:
        """URLs of the lookupds that are asked: the configured ones, and those learnt from them."""
        return tuple(str(lookupd.endpoint) for lookupd in self._lookupds)

    def start(self, loop: Loop, supervisor: Supervisor | None = None) -> None:
        """Begin to poll, at once, on a loop; ``supervisor``: of the owner. Does nothing when it runs already."""
        self._check_thread("LookupPoller.start()")
        if self._life is not None:
            return
        self._life = object()
        self._loop = loop
        self._owner = loop.owner()
        self._owner.claim()
        self._supervisor = supervisor or loop.supervisor(log)
        self._wake, self._told = Event(loop), Changes(loop)
        # What was known before ``stop`` stays known, and is asked for again at once.
        for topic in self._topics.values():
            topic.due = 0.0
            topic.open = 0
            topic.is_settled = topic.topology is not None
        self._tasks[self._supervisor.keep("nsq_fast lookup", self._poll)] = None

    def stop(self) -> None:
        """End polling and give up requests under way. Does not wait; may be called by the listener."""
        self._check_thread("LookupPoller.stop()")
        if self._life is None:
            return
        self._life = None
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            task.cancel()
        self._asks_nodes = None
        for lookupd in self._lookupds:
            lookupd.is_busy = False  # a sequence that was ended before it began cannot say so itself
            lookupd.skipped.clear()
            lookupd.close()
        self._told.set()

    def add_topic(self, topic: str, is_sought: bool = True) -> None:
        """Poll for ``topic`` too; a running poller asks for it at once. Raises NameInvalid.

        A consumer's topic that nobody knows yet is asked for more often, unless ``is_sought`` is False.
        """
        self._check_thread("LookupPoller.add_topic()")
        if topic not in self._topics:
            is_sought = is_sought and self._searches
            self._topics[check_topic(topic)] = PolledTopic(topic, self._config, self._keep, is_sought)
            self._wake_up()

    def remove_topic(self, topic: str) -> None:
        """Forget ``topic``."""
        self._check_thread("LookupPoller.remove_topic()")
        if self._topics.pop(topic, None) is not None and self._life is not None:
            self._told.set()

    def refresh(self, topic: str | None = None, later: float = 0.0) -> None:
        """Ask again soon, or in ``later`` seconds, for one topic or for all: what is known proved stale.

        Never blocks. Calls that come in one burst are one round, and there is one round each
        ``lookupd_refresh_interval`` at most; a call that comes too early is served late, not lost.
        """
        self._check_thread("LookupPoller.refresh()")
        if topic is not None:
            self.add_topic(topic)
        now = monotonic()
        for known in [self._topics[topic]] if topic is not None else list(self._topics.values()):
            if known.refresh(now, later):
                self._wake_up()

    def topology(self, topic: str) -> Topology | None:
        """What is known of ``topic``; None before there was a good answer. Empty when the topic is unknown."""
        known = self._topics.get(topic)
        return known.topology if known is not None else None

    def asked_at(self, topic: str) -> float:
        """When the question was asked of which ``topology`` is the answer, ``time.monotonic``."""
        known = self._topics.get(topic)
        return float("-inf") if known is None else known.answer_asked_at

    async def wait_topology(self, topic: str, timeout: float | None = None) -> Topology:
        """The topology of ``topic``; adds the topic, and waits until all lookupds have answered, or stragglers alone
        have not.

        Raises LookupFailed when ``timeout`` seconds (None: no limit) pass first, or the poller is stopped
        meanwhile; NotRunning when it does not run.
        """
        self._check_thread("LookupPoller.wait_topology()")
        self.add_topic(topic)
        known = self._topics[topic]
        if not known.is_settled:
            self._check_running()
            life = self._life
            await self._told.wait_while(
                lambda: not known.is_settled and life is self._life and self._topics.get(topic) is known,
                None if timeout is None else monotonic() + timeout,
            )
        if known.topology is None:
            raise LookupFailed(f"no lookupd answered for topic {topic!r}: {self.failure() or 'no reply yet'}")
        return known.topology

    def failure(self) -> str:
        """Why lookupds did not answer the last time; empty when all did."""
        return "; ".join(lookupd.last_error for lookupd in self._lookupds if lookupd.last_error)

    def answering(self) -> list[str]:
        """The URLs of the lookupds whose last answer was not a bad one."""
        return [str(lookupd.endpoint) for lookupd in self._lookupds if not lookupd.last_error]

    def change_lookupds(self, added: tuple[Endpoint, ...], removed: frozenset[Endpoint]) -> None:
        """Ask ``added``, too, and never ``removed``, in place of what an earlier call said. Takes effect at once."""
        self._check_thread("LookupPoller.change_lookupds()")
        if self._lookupds.change(added, removed):
            self._ask_now()

    # Rounds

    async def _poll(self) -> None:
        life = self._life
        while self._life is life:
            self._wake.clear()
            self._start_round()
            await self._end_grace()
            await self._wake.wait(self._pause())

    def _pause(self) -> float | None:
        """Seconds until there is something to do without being woken; None when there is nothing.

        With every lookupd busy no round can start: the one that gets free wakes us.
        """
        now = monotonic()
        topics = self._topics.values()
        moments = [topic.asked_at + STRAGGLER_GRACE for topic in topics if not topic.is_concluded]
        if self._lookupds.free(now):
            moments.extend(topic.due for topic in topics)
        return max(0.0, min(moments) - now) if moments else None

    def _start_round(self) -> None:
        now = monotonic()
        # Each round costs every lookupd a connection, and the client a look at all topics. So those that are sought go
        # along when they are due in a moment: of 100, that is a third of the connections.
        topics = [topic for topic in self._topics.values() if topic.due <= now + (BURST if topic.searches else 0.0)]
        lookupds = self._lookupds.free(now)
        if not lookupds or all(topic.due > now for topic in topics):
            return
        self._round_number += 1
        self._chance = random.random()
        busy = [lookupd for lookupd in self._lookupds if lookupd.is_busy]
        for lookupd in busy:
            lookupd.skipped.update(dict.fromkeys(topics))
        owing = {*busy, *lookupds}
        if self._next_poll <= now:
            self._next_poll = now + jittered(self._config.lookupd_poll_interval, self._config, self._chance)
        for topic in topics:
            topic.begin(self._round_number, now, self._next_poll, len(lookupds), owing)
        for lookupd in lookupds:
            lookupd.is_busy = True
            self._spawn("nsq_fast lookup of a round", self._ask_all, lookupd, self._round_number, now, topics)

    async def _ask_all(self, lookupd: Lookupd, number: int, asked_at: float, topics: Iterable[PolledTopic]) -> None:
        """The part of one lookupd in a round."""
        life = self._life
        try:
            await self._ask_side_by_side(lookupd, number, asked_at, deque(topics))
        finally:
            if life is self._life:  # else ``stop`` has done this, and another life may have begun
                lookupd.is_busy = False
                skipped, lookupd.skipped = lookupd.skipped, {}
                if skipped and not lookupd.failures:
                    # All in one round: in one of its own each would keep it busy while the others are due.
                    due = max(topic.asked_at for topic in skipped) + self._config.lookupd_refresh_interval
                    for topic in skipped:
                        topic.catch_up(due)
                self._wake.set()
        try:
            # It has named other lookupds: they are asked now, not in a poll interval.
            if await self._lookupds.grow(self._loop, lookupd) and life is self._life:
                self._ask_now()
        finally:
            if not lookupd.is_busy:
                lookupd.close()

    async def _ask_side_by_side(
        self, lookupd: Lookupd, number: int, asked_at: float, topics: deque[PolledTopic]
    ) -> None:
        """Ask over one connection while answers come soon; over twice as many each time that they do not.

        A lookupd that cannot answer about one topic says nothing of the others; one that does not answer at all is
        asked nothing more.
        """
        life, most = self._life, SIDE_BY_SIDE // len(list(self._lookupds))
        count, has_answered, is_silent, failure = 0, False, False, ""

        async def ask_some() -> None:
            nonlocal count, has_answered, is_silent, failure
            while topics:
                topic, answer = topics.popleft(), None
                if not is_silent:
                    try:
                        answer = await lookupd.lookup(self._loop, topic.name)
                        has_answered = True
                    except NsqError as error:  # not kept: its traceback would keep a huge reply alive
                        failure = str(error)
                        is_silent |= isinstance(error, HttpError) and error.status is None
                    except Exception as fault:
                        what = f"lookup of {topic.name} at {lookupd.endpoint}"
                        self._supervisor.report(what, fault, "the other topics are asked")
                        failure = printable(repr(fault))
                    self.errors += answer is None
                elif len(topics) % _TOPICS_A_TURN == 0:  # thousands of topics must not hold the loop up
                    await self._loop.sleep(0)
                if life is not self._life:
                    return
                count += 1
                topic.heard(number, lookupd, answer)
                if topic.is_answered and topic.answers:
                    self._learn(topic, asked_at)
                elif not topic.open and topic.round_number == number:
                    topic.unanswered(self._chance)

        tasks = [self._spawn("nsq_fast lookup", ask_some)]
        before = 0
        while topics and len(tasks) < most and not await tasks[0].join(PATIENCE) and life is self._life:
            if count - before < len(tasks):  # they do not keep up
                more = min(len(tasks), most - len(tasks), len(topics))
                tasks += [self._spawn("nsq_fast lookup", ask_some) for _ in range(more)]
            before = count
        for task in tasks:
            await task.join()
        if life is not self._life:
            return
        if has_answered or not failure:
            lookupd.succeeded()
        else:
            lookupd.failed_for(failure)

    def _learn(self, topic: PolledTopic, asked_at: float) -> None:
        """Use what the lookupds have said of it, in answer to what was asked then or before."""
        try:
            self._take(topic, asked_at)
        except Exception as fault:
            self._supervisor.report(f"lookup of {topic.name}", fault, "the other topics are published")

    def _take(self, topic: PolledTopic, asked_at: float) -> None:
        before = topic.topology
        found = topic.unite()
        if found.is_empty and not topic.is_concluded:
            return  # another lookupd may know it
        topic.take(found, asked_at)
        is_first, topic.is_told = not topic.is_told, True
        if not found.is_empty:
            topic.found(found)
        # A producer need not wait: it takes any nsqd for a topic that none has. But lookupds that were busy, which may
        # have named this very topic, are still to be asked.
        elif topic.is_sought or topic.is_partial:
            topic.missing(self._chance)
        if topic.is_concluded:
            topic.is_settled = True
            self._told.set()
        is_wanted = self._topics.get(topic.name) is topic
        if self._listener is not None and is_wanted and (is_first or found is not before):
            self._listener(topic.name, found)

    async def _end_grace(self) -> None:
        """Conclude what was said of the topics whose round takes long."""
        begun_by, life = monotonic() - STRAGGLER_GRACE, self._life
        late = [each for each in self._topics.values() if not each.is_concluded and each.asked_at <= begun_by]
        if late:
            await self._loop.sleep(0)  # what has come while the loop was held up counts
        for number, topic in enumerate(late, 1):
            if life is not self._life:
                return
            if not topic.is_concluded:
                topic.is_late = True
                if topic.is_answered and topic.answers:
                    self._learn(topic, topic.asked_at)
            if number % _TOPICS_A_TURN == 0:
                await self._loop.sleep(0)

    # What is not about one topic

    async def nodes(self, timeout: float | None = None) -> tuple[Nsqd, ...]:
        """Ask for every nsqd the lookupds know, whatever its topics: original nsqds create topics on publish.

        ``discovery_filter`` leaves out what it leaves out of topologies.
        Callers share one question, and its answer for ``lookupd_refresh_interval``. Raises LookupFailed when no
        lookupd answers, or ``timeout`` seconds pass; NotRunning.
        """
        self._check_thread("LookupPoller.nodes()")
        self._check_running()
        if monotonic() - self._nodes_asked_at >= self._config.lookupd_refresh_interval:
            if self._asks_nodes is None or self._asks_nodes.ready():
                self._asks_nodes = self._spawn("nsq_fast lookup of nsqds", self._ask_nodes)
            asked_at = self._nodes_asked_at
            await self._asks_nodes.join(timeout)
            if self._nodes_asked_at == asked_at:  # too late, ended by stop, or nobody answered
                reason = self.failure() or "no reply yet"
                raise LookupFailed(f"no lookupd answered for the list of nsqds: {reason}")
        if self._keep is None:
            return self._nodes
        try:
            return tuple(nsqd for nsqd in self._nodes if self._keep(nsqd))
        except Exception as error:  # a user's function
            raise LookupFailed(f"discovery_filter failed: {printable(repr(error))}") from error

    @property
    def is_blank(self) -> bool:
        """Whether no lookupd named any nsqd when ``nodes`` was answered last; what the filter leaves out counts."""
        return not self._nodes

    async def _ask_nodes(self) -> None:
        working = [lookupd for lookupd in self._lookupds if not lookupd.failures]
        good = await self._ask_each(working or list(self._lookupds), Lookupd.nodes, STRAGGLER_GRACE)
        if good:
            self._nodes = distinct(nsqd for answer in good for nsqd in answer)
            self._nodes_asked_at = monotonic()

    async def topics(
        self, on_names: Callable[[Iterable[str]], object] | None = None, grace: float | None = None
    ) -> TopicListing:
        """Ask all lookupds which topics there are.

        Args:
            on_names: called with what one of them says as soon as it does, also after this has returned.
            grace: seconds after which stragglers are not waited for, when another has answered; None: they are.

        Raises LookupFailed when none answers; NotRunning.
        """
        self._check_thread("LookupPoller.topics()")
        self._check_running()
        asked = list(self._lookupds)
        good = await self._ask_each(asked, Lookupd.topics, grace, on_names)
        if not good:
            raise LookupFailed(f"no lookupd answered for the list of topics: {self.failure() or 'no reply yet'}")
        return TopicListing(frozenset().union(*good), is_whole=len(good) == len(asked))

    async def _ask_each(
        self,
        lookupds: Sequence[Lookupd],
        ask: Callable[[Lookupd, Loop], Any],
        grace: float | None,
        on_answer: Callable[[Any], object] | None = None,
    ) -> list[Any]:
        """What each of them says. After ``grace`` seconds one good answer is enough."""
        life = self._life
        good: list[Any] = []
        pending = len(lookupds)

        async def ask_one(lookupd: Lookupd) -> None:
            nonlocal pending
            try:
                answer = await ask(lookupd, self._loop)
            except NsqError as error:
                lookupd.last_error = str(error)
            else:
                good.append(answer)
                if on_answer is not None and life is self._life:
                    on_answer(answer)
            finally:
                pending -= 1
                self._told.set()
                if not lookupd.is_busy:
                    lookupd.close()

        for lookupd in lookupds:
            self._spawn("nsq_fast lookup of a list", ask_one, lookupd)
        # In parts: where the loop was held up, one is over before what has come meanwhile is read, the others are not.
        for part in [None] if grace is None else [grace / 5] * 5:
            enough_at = None if part is None else monotonic() + part
            await self._told.wait_while(lambda: pending > 0 and life is self._life, enough_at)
        await self._told.wait_while(lambda: pending > 0 and life is self._life and not good)
        return list(good)

    # Parts

    def _spawn(self, name: str, sequence: Callable[..., Any], *arguments: Any) -> Task:
        """Run a sequence that ends with this life."""
        task: Task

        async def run() -> None:
            try:
                await sequence(*arguments)
            finally:
                self._tasks.pop(task, None)

        task = self._supervisor.job(name, run)
        self._tasks[task] = None
        return task

    def _ask_now(self) -> None:
        """Others are asked than before: what they know is wanted now, not in a poll interval."""
        for topic in self._topics.values():
            topic.due = monotonic()
        self._wake_up()

    def _wake_up(self) -> None:
        if self._life is not None:
            self._wake.set()

    def _check_running(self) -> None:
        if self._life is None:
            raise NotRunning("the lookup poller is not started")

    def _check_thread(self, call: str) -> None:
        if self._owner is not None and self._life is not None:
            self._owner.check(call)


class TopicWatch:
    """Keeps a consumer at the topics that match a pattern: asks which there are each ``lookupd_poll_interval``.

    Args:
        follow: called with topics that match, as soon as a lookupd has named them, and with those that matched and are
            listed by no lookupd any more. Those that some lookupd, which did not answer, may still list are neither.
    """

    def __init__(
        self,
        poller: LookupPoller,
        choice: TopicChoice,
        config: LookupConfig,
        follow: Callable[[Sequence[str], Sequence[str]], object],
        log: logging.Logger,
    ) -> None:
        self._poller = poller
        self._choice = choice
        self._config = config
        self._follow = follow
        self._log = log
        self._followed: set[str] = set()
        self._task: Task | None = None

    def start(self, loop: Loop, supervisor: Supervisor, name: str) -> None:
        self._task = supervisor.keep(name, lambda: self._run(loop))

    def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self, loop: Loop) -> None:
        searches, told = 0, ""
        while self._task is not None:
            began = monotonic()
            problem = await self._look()
            if problem and problem != told and self._task is not None:
                self._log.warning("%s; asking again until that changes", problem, extra=TOPICS_UNKNOWN)
            searches, told = searches + 1 if problem else 0, problem
            # From the question on: a lookupd that hangs puts the next one off no longer than that.
            await loop.sleep(max(0.0, began + self._pause(searches) - monotonic()))

    async def _look(self) -> str:
        """Ask once; return what keeps the consumer from having a topic, or from knowing those that are new."""
        try:
            # The next look must not wait for a lookupd that hangs.
            grace = self._config.lookupd_poll_interval if self._followed else STRAGGLER_GRACE
            listing = await self._poller.topics(self._take, grace)
        except (LookupFailed, NotRunning) as error:
            return str(error)
        if listing.is_whole:
            gone = sorted(self._followed.difference(listing.names))
            if gone and self._task is not None:
                self._followed.difference_update(gone)
                self._follow([], gone)
        return "" if self._followed else f"lookup lists no topic that matches {str(self._choice)!r}"

    def _take(self, names: Iterable[str]) -> None:
        if self._task is None:
            return
        found = self._choice.matching(names)
        if found:
            self._followed.update(found)
            self._follow(found, [])

    def _pause(self, searches: int) -> float:
        """Seconds from one question to the next, of which so many in a row have found that something is wrong."""
        interval = self._config.lookupd_poll_interval
        if searches:
            interval = min(interval, grown(FIRST_LISTING, 2.0, searches - 1, LONGEST_SEARCH))
        return jittered(interval, self._config, random.random())
