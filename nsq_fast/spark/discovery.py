"""Find the nsqds that serve a topic now, how to reach them, and the partitions that they lead.

This is done anew for each batch. A failure that may pass soon (a lookup service
that restarts, a partition that changes its leader) is retried here, for as long
as the caller allows.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from gevent import joinall, sleep

from nsq_fast._lazy import get_logger
from nsq_fast.client.admin import LookupdHTTPClient, LookupPoller, NsqdHTTPClient
from nsq_fast.client.greenlets import Greenlet
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError, HttpError, LookupFailed, RemoteProtocolError, counted
from nsq_fast.log_events import SPARK_LOOKUP_FAILED, SPARK_WAITS
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import REDESIGNED_MARK
from nsq_fast.protocol.topology import Meta, Topology
from nsq_fast.protocol.topology import Nsqd as KnownNsqd

from .options import SourceOptions
from .streams import Reminder

T = TypeVar("T")
ClientT = TypeVar("ClientT", LookupdHTTPClient, NsqdHTTPClient)
logger: logging.Logger = get_logger(__name__)

NO_ANSWER = (HttpError, LookupFailed, RemoteProtocolError, OSError)
"""What a question raises that servers do not answer."""

TIMEOUT = 10.0
"""How long transient failures are tried again, in seconds."""

MISSING_PATIENCE = 5.0
"""How long a topic that nobody knows is looked for when a query begins, in seconds."""

TOPICS_AGE = 10.0
"""Topics are looked up anew after so many seconds, where they are given as a pattern."""

_NO_COORDINATOR = "Coordinator is disabled"
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 1.0


class Nsqd(NamedTuple):
    """An nsqd that has the topic."""

    tcp: Address
    http: Endpoint
    version: str = ""

    @property
    def is_redesigned(self) -> bool:
        return REDESIGNED_MARK in self.version

    def __str__(self) -> str:
        return str(self.tcp)


class TopicServers(NamedTuple):
    """Who serves a topic.

    Attributes:
        nsqds: all of them, by address.
        leaders: the nsqd that leads each partition; empty on original servers, and on a redesigned one outside a
            cluster.
        meta: what a redesigned lookup says of the topic; None elsewhere.
        is_redesigned: the family of the servers.
    """

    nsqds: tuple[Nsqd, ...] = ()
    leaders: Mapping[int, Nsqd] = {}
    meta: Meta | None = None
    is_redesigned: bool = False

    @property
    def has_ext(self) -> bool:
        """Whether messages carry ext headers: ``extend_support`` of the connections must be the same."""
        return self.meta is not None and self.meta.extend_support

    @property
    def is_ordered(self) -> bool:
        return self.meta is not None and self.meta.ordered


def discover(options: SourceOptions, *, timeout: float = TIMEOUT) -> TopicServers:
    """Find the servers of the topic. Raises LookupFailed when that cannot be done within ``timeout`` seconds.

    An unknown topic has no nsqds; whether its servers are redesigned is then taken from the nsqds of other topics.
    """
    ask = _ask_lookup if options.servers.lookupd_http else _ask_nsqds
    return retried(lambda left: ask(options, left), timeout)


def in_cluster(options: SourceOptions, servers: TopicServers) -> bool:
    """Whether the nsqds have a coordinator: without it the redesigned ones do not move channels either.

    Lookup services have ``meta`` of the topics of clusters only; without them an nsqd is asked. Raises as ``discover``.
    """
    if options.servers.lookupd_http or not servers.is_redesigned:
        return servers.is_redesigned and servers.meta is not None
    nsqd = next(nsqd for nsqd in servers.nsqds if nsqd.is_redesigned)
    return retried(lambda left: _has_coordinator(options, nsqd, left))


def retried(attempt: Callable[[float], T], timeout: float = TIMEOUT) -> T:
    """Call ``attempt(seconds left)`` until it succeeds; raise its last error when the time is over.

    An error that will not pass is raised at once: an HTTP status of 400 to 499.
    """
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        left = deadline - time.monotonic()
        try:
            return attempt(max(left, _FIRST_PAUSE))
        except NO_ANSWER as error:
            if not is_transient(error) or left < pause:
                raise
        sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    return not (isinstance(error, HttpError) and 400 <= (error.status or 0) < 500)


def check_redesigned(options: SourceOptions, timeout: float = TIMEOUT) -> None:
    """Raise ConfigError when the topic's servers are known to be the original NSQ's, which cannot replay.

    Servers that do not answer, or are of neither kind yet, pass: who asks them next says so.
    """
    try:
        servers = discover(options, timeout=timeout)
        nsqds = servers.nsqds or (all_nsqds(options, timeout) if options.servers.lookupd_http else ())
    except NO_ANSWER as error:
        logger.warning("topic %s: %s", options.topic, error, extra=SPARK_LOOKUP_FAILED)
        return
    known = [nsqd for nsqd in nsqds if nsqd.version]
    if known and not any(nsqd.is_redesigned for nsqd in known):
        raise ConfigError(
            f"reader='replayable': the servers of topic {options.topic!r} are the original NSQ's"
            f" ({known[0].tcp} runs {known[0].version}), which cannot deliver again what was finished; leave the"
            " option reader out, and give a journal"
        )


def check_replayable(options: SourceOptions, timeout: float) -> tuple[str, ...]:
    """As ``check_topics``; first, where one is missing, as ``check_redesigned``."""
    try:
        return check_topics(options, timeout)
    except LookupFailed:
        check_redesigned(options.for_topic(options.topics[0]))
        raise


def unknown_topic(options: SourceOptions) -> LookupFailed:
    who = "nsqlookupd" if options.servers.lookupd_http else "nsqd"
    return LookupFailed(
        f"topic {options.topic!r} is not known to {who} {', '.join(options.server_names)}: is its name right, and has"
        " anything been published to it?"
    )


def check_topics(options: SourceOptions, timeout: float = TIMEOUT) -> tuple[str, ...]:
    """The topics that the options name and nobody knows, with a warning; for the beginning of a query.

    Raises LookupFailed for the first of them with ``failOnMissingTopic``, after a while in which servers that have been
    started with the query may learn of it; NO_ANSWER when none answers for ``timeout`` seconds.
    """
    until = time.monotonic() + MISSING_PATIENCE
    while True:
        known = retried(lambda left: known_topics(options, left), timeout) if options.topics else set()
        missing = tuple(topic for topic in options.topics if topic not in known)
        if not missing:
            return ()
        told = unknown_topic(options.for_topic(missing[0]))
        if not options.fail_on_missing_topic:
            logger.warning("%s Nothing is read of it", told, extra=SPARK_WAITS)
            return missing
        if time.monotonic() > until:
            raise LookupFailed(f"{told} failOnMissingTopic=false goes on without it")
        sleep(_FIRST_PAUSE)


def all_nsqds(options: SourceOptions, timeout: float = TIMEOUT) -> tuple[Nsqd, ...]:
    """Every nsqd that the lookup services know. Raises LookupFailed."""
    with _lookup(options) as poller:
        return tuple(_from_lookup(nsqd) for nsqd in poller.nodes(timeout))


class TopicFinder:
    """The topics that the options ask for: those that they name, or those that match their pattern, looked up anew.

    What was found once is kept: a topic that is gone has still to be accounted for.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._found: set[str] = set()
        self._looked_at = float("-inf")
        self._reminder = Reminder(logger)

    def topics(self, timeout: float = 0.0) -> tuple[str, ...]:
        """Their names, in order.

        Args:
            timeout: how long servers are tried again, in seconds; after that those are given that are known, unless
                none is: then LookupFailed is raised.
        """
        if self._options.topic_pattern is None:
            return self._options.topics
        now = time.monotonic()
        if now - self._looked_at >= TOPICS_AGE:
            self._looked_at = now
            self._look(timeout)
        return tuple(sorted(self._found))

    def _look(self, timeout: float) -> None:
        key = f"topicPattern={self._options.topic_pattern!r}"
        try:
            patience = self._options.lookup.lookupd_timeout  # an answer may take so long, however short ``timeout`` is
            names = retried(lambda left: known_topics(self._options, max(left, patience)), timeout)
        except NO_ANSWER as error:
            if not self._found and timeout:
                raise
            self._reminder.warn(key, f"{key}: no topics can be looked up: {error}")
            return
        self._found.update(name for name in names if self._options.names_topic(name))
        if self._found:
            self._reminder.over(key)
        else:
            there = f"{'is' if len(names) == 1 else 'are'} {counted(len(names), 'topic')}"
            self._reminder.warn(key, f"{key}: there {there}, and none matches it; they are looked for again")


def known_topics(options: SourceOptions, timeout: float = TIMEOUT) -> set[str]:
    """All topics that the lookup services, or the nsqds, know: all are asked at once.

    Raises the error of one when none answers within ``timeout`` seconds.
    """
    endpoints = options.servers.lookupd_http or options.servers.nsqd_http
    jobs = [Greenlet.spawn(_topics_of, options, endpoint, timeout) for endpoint in endpoints]
    joinall(jobs)
    answers: list[set[str] | Exception] = [job.get() for job in jobs]
    found = [each for each in answers if isinstance(each, set)]
    if not found:
        raise next(each for each in answers if isinstance(each, Exception))
    return set().union(*found)


def _topics_of(options: SourceOptions, endpoint: Endpoint, timeout: float) -> set[str] | Exception:
    try:
        if options.servers.lookupd_http:
            with _client(LookupdHTTPClient, options, endpoint, timeout) as lookupd:
                return {str(each) for each in lookupd.topics().get("topics") or ()}
        with nsqd_client(options, endpoint, timeout) as nsqd:
            return {str(row["topic_name"]) for row in nsqd.stats().get("topics") or ()}
    except (HttpError, RemoteProtocolError, OSError) as error:
        return error


def nsqd_client(options: SourceOptions, nsqd: Nsqd | Endpoint, timeout: float | None = None) -> NsqdHTTPClient:
    """A client of its HTTP routes, to be closed after use."""
    return _client(NsqdHTTPClient, options, nsqd.http if isinstance(nsqd, Nsqd) else nsqd, timeout)


def _client(kind: type[ClientT], options: SourceOptions, endpoint: Endpoint, timeout: float | None) -> ClientT:
    return kind(
        *endpoint.address,
        scheme=endpoint.scheme,
        timeout=options.lookup.lookupd_timeout if timeout is None else timeout,
        authorization=options.lookup.lookupd_authorization,
        tls_options=options.lookup.lookupd_tls_options,
    )


# Through lookup services


def _ask_lookup(options: SourceOptions, timeout: float) -> TopicServers:
    with _lookup(options) as poller:
        topology = poller.wait_topology(options.topic, timeout)
        if topology.is_empty:
            others = poller.nodes(timeout)
            return TopicServers(meta=topology.meta, is_redesigned=any(nsqd.is_redesigned for nsqd in others))
        return _from_topology(topology)


_lookup_logger = logging.getLogger("nsq_fast.lookup")
_told = Reminder(logger)


@contextlib.contextmanager
def _lookup(options: SourceOptions) -> Iterator[LookupPoller]:
    """Asks the lookup services for one answer.

    A poller that lasts logs a service when it begins to fail. Each of ours is new, and Spark has us ask every few
    hundred ms; so its warnings are held back, and told every minute. Where nobody answers the error names them all.
    """
    _lookup_logger.addFilter(_is_no_warning)
    poller = LookupPoller([str(each) for each in options.servers.lookupd_http], options.lookup)
    poller.start()
    try:
        yield poller
        if failure := poller.failure():
            _told.note(f"lookup services that fail are passed over: {failure}")
    finally:
        poller.stop()
        _lookup_logger.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING


def _from_topology(topology: Topology) -> TopicServers:
    leaders = {number: _from_lookup(nsqd) for number, nsqd in topology.partitions.items()}
    nsqds = tuple(_from_lookup(nsqd) for nsqd in topology.nsqds)
    return TopicServers(nsqds, leaders, topology.meta, any(nsqd.is_redesigned for nsqd in nsqds))


def _from_lookup(nsqd: KnownNsqd) -> Nsqd:
    if nsqd.http is None:
        raise LookupFailed(f"lookup names no HTTP port of nsqd {nsqd.tcp}")
    return Nsqd(nsqd.tcp, Endpoint("http", nsqd.http), nsqd.version)


# By asking the nsqds themselves


def _ask_nsqds(options: SourceOptions, timeout: float) -> TopicServers:
    """All are asked at once. One that fails is still a server of the topic, as long as another answers."""
    servers = options.servers
    jobs = [
        Greenlet.spawn(_ask_nsqd, options, Nsqd(tcp, http), min(timeout, options.lookup.lookupd_timeout))
        for tcp, http in zip(servers.nsqd_tcp, servers.nsqd_http, strict=True)
    ]
    joinall(jobs)
    answers: list[_Answer] = [job.get() for job in jobs]
    failures = {answer.nsqd: answer.error for answer in answers if answer.error}
    if len(failures) == len(answers):
        raise next(iter(failures.values()))
    for nsqd, error in failures.items():
        logger.warning("nsqd %s does not answer: %s", nsqd, error, extra=SPARK_LOOKUP_FAILED)
    rows = [row for answer in answers for row in answer.rows]
    leaders = {int(row["topic_partition"]): answer.nsqd for answer in answers for row in answer.rows}
    nsqds = tuple(answer.nsqd for answer in answers)
    is_redesigned = any(nsqd.is_redesigned for nsqd in nsqds)
    return TopicServers(nsqds, dict(sorted(leaders.items())), _meta(rows), is_redesigned)


class _Answer(NamedTuple):
    """What one nsqd says: its version, and the rows of /stats of the partitions that it leads."""

    nsqd: Nsqd
    rows: list[Mapping[str, Any]]
    error: HttpError | RemoteProtocolError | None = None


def _ask_nsqd(options: SourceOptions, nsqd: Nsqd, timeout: float) -> _Answer:
    with nsqd_client(options, nsqd, timeout) as client:
        try:
            nsqd = nsqd._replace(version=str(client.info().get("version", "")))
            return _Answer(nsqd, _partitions_led(client, options.topic) if nsqd.is_redesigned else [])
        except (HttpError, RemoteProtocolError) as error:
            return _Answer(nsqd, [], error)


def _has_coordinator(options: SourceOptions, nsqd: Nsqd, timeout: float) -> bool:
    with nsqd_client(options, nsqd, min(timeout, options.lookup.lookupd_timeout)) as client:
        try:
            client.call("GET", "/coordinator/stats", topic=options.topic)
        except HttpError as error:
            if error.text.startswith(_NO_COORDINATOR):
                return False
            raise
    return True


def _partitions_led(client: NsqdHTTPClient, topic: str) -> list[Mapping[str, Any]]:
    topics = client.stats(topic).get("topics") or []
    return [row for row in topics if row.get("topic_name") == topic and row.get("is_leader")]


def _meta(rows: list[Mapping[str, Any]]) -> Meta | None:
    """What the nsqds say of the topic; how many partitions it has is only known to lookup."""
    if not rows:
        return None
    return Meta(
        partition_num=len(rows),
        extend_support=any(row.get("is_ext") for row in rows),
        ordered=any(row.get("is_multi_ordered") for row in rows),
    )
