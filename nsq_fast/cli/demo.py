"""`nsq-fast demo`: run a job on original servers, and one on an ordered topic of a redesigned cluster; show how they
go, and say what came of them.

Without servers of your own they run on embedded ones in processes of their own. A redesigned cluster of your own gets
the ordered part only, because nothing else of the job works there. At the end Spark, where it runs, reports on the
trace records.

``MainJob`` publishes to several topics and consumes them with handlers of every kind: some fail once or always,
requeue, touch, or answer from another greenlet. What happens to a message depends on its number alone, so that every
seed of trouble is there in every run. ``OrderedJob`` publishes with keys, traced, while a partition gets another
leader, and checks that the messages of a key come in order. Both account for each message in a ``Ledger``: loss and
duplication are counted, not guessed. That the server has taken the FINs is seen in its own statistics afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import struct
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, perf_counter, perf_counter_ns
from typing import Any
from uuid import uuid4

import click
from gevent import Greenlet, joinall, sleep, spawn
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.client.admin import AdminClient, LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.client.trace import ConsumeRecord, PublishRecord, TraceLog, TraceRecord, log_to_file, read_records
from nsq_fast.consumer import Consumer
from nsq_fast.errors import NsqError, RequeueMessage, counted
from nsq_fast.producer import Producer

from . import console, options
from .admin import Lookup
from .options import flag, option, say
from .servers import INTERRUPTED, LOOKUPD, NSQD_TCP, Servers, named_servers, stop_signals
from .stat import add_up
from .trace_report import why_not

CHANNEL = "workers"
BODY_SIZE = 200
MAX_TRIES = 3
STALL_TIMEOUT = 30.0
"""Seconds without any progress after which a job ends."""

_TICK = 0.1
_CLOSE_TIMEOUT = 10.0
_PARTITIONS = 3
_READY_TIMEOUT = 120.0
_READY_POLL = 0.2
_LINE_EVERY = 1.0
_SPARK_TIMEOUT = 300.0
_REPORT_ARGUMENTS = ("--window", "200ms", "--grace", "0", "--memory", "512m", "--master", "local[2]")

Tell = Callable[["Ledger"], None]
Results = dict[str, Any]

_NOTES = {
    "published": "answered OK",
    "publish_failed": "not answered OK",
    "delivered": "calls of handlers",
    "finished": "FIN",
    "failed": "handlers that raised",
    "requeued": "REQ, the failed ones included",
    "touched": "TOUCH, then FIN",
    "answered_later": "FIN from another greenlet",
    "given_up": f"failed {MAX_TRIES} times",
    "lost": "published, never finished nor given up",
    "duplicated": "finished more than once",
    "order_violations": "messages of a key after later ones",
    "leader_moves": "partitions that got another leader in the middle",
    "traces_published": "trace records of publishes",
    "traces_joined": "of these, found again in those of the consumer",
    "left_on_server": "waiting, in flight or deferred at the end",
    "messages_per_second": "finished, from the start until all was done",
    "latency_p50_ms": "publish to handler, first delivery",
    "latency_p99_ms": "",
}


@options.command("demo", "Run the main job, end to end.")
def command(
    servers: Servers = named_servers(NSQD_TCP),
    messages: int = options.number(default=200_000, help="How many messages."),
    topics: int = options.number(default=4, most=64, help="Over how many topics."),
    ordered_messages: int | None = options.number(
        least=0, help="How many messages in the ordered topic; 0: none.  [default: a tenth of --messages]"
    ),
    trace_html: Path | None = options.output_file(
        "--trace-html", help="Where the report on the traces goes.  [default: a new folder for temporary files]"
    ),
    traces: bool = option(
        "--traces/--no-traces", default=True, help="Report on the traces of the ordered topic, where Spark runs."
    ),
    as_json: bool = flag("--json", help="Print the summary as one line of JSON."),
) -> None:
    """Publish to several topics and consume them, with handlers that succeed, fail, requeue, touch and answer later.

    On an embedded broker, or on the servers of --lookupd or --nsqd, in topics of its own; with --nsqd alone these stay
    there. Then publish to an ordered, traced topic of an embedded redesigned cluster while a leader moves; where Spark
    is installed, it reports on the traces.

    When --lookupd names a redesigned cluster, only the ordered part runs, in a topic that is created for it and deleted
    afterwards; no leader is moved. The exit code is 1 when a message was lost or came out of order.
    """
    if servers.are_named:
        servers = servers.found()
    lookup = Lookup(servers) if servers.lookupds else None
    is_cluster = lookup is not None and lookup.is_redesigned
    if ordered_messages is None:
        ordered_messages = messages if is_cluster else -(-messages // 10)
    results: Results = {}
    codes = []
    with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="nsq-fast-demo-") as folder:
        if not is_cluster:
            with original_servers(servers) as place:
                found, code = _run(MainJob(place, messages, topics), stop, as_json)
            results |= found
            codes.append(code)
        if ordered_messages and not stop.is_set() and (is_cluster or not servers.are_named):
            log = Path(folder, "trace.log")
            with existing_cluster(lookup, servers) if lookup else embedded_cluster(servers) as place:
                results["ordered"], code = _run(OrderedJob(place, ordered_messages, log), stop, as_json)
            codes.append(code)
            if traces and not stop.is_set():
                results |= _report_on_traces(log, trace_html, as_json)
    if as_json:
        click.echo(json.dumps(results))
    raise SystemExit(next(filter(None, codes), 0))


def _run(job: Job, stop: Event, quiet: bool) -> tuple[Results, int]:
    """Run a job, show what came of it, and judge it."""
    results = job.run(stop, _teller(job.ledger.size, quiet))
    if not quiet:
        title = f"{counted(job.ledger.size, 'message')} of {BODY_SIZE} bytes, {job.title}"
        rows = [
            (name.replace("_", " "), _cell(results[name]), note) for name, note in _NOTES.items() if name in results
        ]
        output = console.output()
        output.print(console.notes(title, rows))
        output.print(f"{results['ended']} in {results['seconds']:.2f} s")
    return results, INTERRUPTED if results["ended"] == "interrupted" else int(not job.is_good(results))


def _report_on_traces(log: Path, page: Path | None, quiet: bool) -> Results:
    """Have Spark report on the trace records; one line where it cannot, which is no failure.

    It runs in a process of its own, after the cluster has ended: its calls would block the hub of gevent.
    """
    page = page or Path(tempfile.gettempdir(), f"nsq-fast-traces-{uuid4().hex[:8]}", "traces.html")
    arguments = [str(log), "--html", str(page), *_REPORT_ARGUMENTS, *(["--json"] if quiet else [])]
    reason = why_not()
    if reason is None:
        say("the traces of the ordered topic: Spark reports on them, which takes a minute")
        command = [sys.executable, "-m", "nsq_fast", "trace-report", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SPARK_TIMEOUT, check=True)
        except subprocess.TimeoutExpired:
            reason = f"Spark took longer than {_SPARK_TIMEOUT:.0f} s"
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or [str(error)])[-1].removeprefix("Error: ")
    if reason is not None:
        click.echo(f"no trace report: {reason}", err=quiet)
        return {}
    if quiet:
        return {"traces": {**json.loads(done.stdout), "report": str(page)}}
    click.echo(done.stdout, nl=False)
    return {}


def _teller(size: int, quiet: bool) -> Tell:
    """What says once a second how far a job is."""
    due = perf_counter() + _LINE_EVERY

    def tell(ledger: Ledger) -> None:
        nonlocal due
        if not quiet and perf_counter() >= due:
            due = perf_counter() + _LINE_EVERY
            say(f"published {ledger.published:,}  answered {ledger.settled:,}  of {size:,}")

    return tell


def _cell(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


# Where a job runs


@dataclasses.dataclass(frozen=True)
class Place:
    """Servers for a job; an ordered one has a topic that is ready.

    Attributes:
        nsqds_http: for the accounts afterwards, as far as they are known.
        move: gives a partition of the topic another leader, where that may be done.
    """

    name: str
    servers: Servers
    nsqds_http: Sequence[str] = ()
    topic: str = ""
    move: Callable[[], None] | None = None

    def left(self, topics: Sequence[str]) -> int | None:
        """What the nsqds still hold of these topics; None where they cannot be asked."""
        if not self.nsqds_http:
            return None
        clients = [NsqdHTTPClient.from_url(nsqd, **self.servers.of_http) for nsqd in self.nsqds_http]
        return sum(row.unanswered for row in add_up(each.stats(topic=topic) for each in clients for topic in topics))

    def delete(self, topics: Sequence[str]) -> None:
        """Delete the topics, on nsqds before lookupds; not every server has every topic."""
        kinds: dict[type[AdminClient], Sequence[Any]] = {
            NsqdHTTPClient: self.nsqds_http,
            LookupdHTTPClient: self.servers.lookupds,
        }
        for kind, addresses in kinds.items():
            for address in addresses:
                client: Any = kind.from_url(str(address), **self.servers.of_http)
                for topic in topics:
                    with suppress(NsqError):
                        client.delete_topic(topic)


def _known_by(lookupds: Sequence[Any], servers: Servers) -> Servers:
    return servers._replace(lookupds=[LOOKUPD.kind(f"http://{lookupd.http}") for lookupd in lookupds])


@contextmanager
def original_servers(servers: Servers) -> Iterator[Place]:
    """Those that are named; else embedded ones, in a process of its own."""
    if servers.are_named:
        kind, http = ("nsqlookupd", servers.all_http()) if servers.lookupds else ("nsqd", [])
        yield Place(f"{kind} {', '.join(map(str, servers.lookupds or servers.nsqds))}", servers, http)
    else:
        with BrokerProcess() as broker:
            http = [str(nsqd.http) for nsqd in broker.nsqds]
            yield Place("embedded nsqd and nsqlookupd", _known_by([broker.lookupd], servers), http)


@contextmanager
def embedded_cluster(servers: Servers) -> Iterator[Place]:
    """A cluster of three nsqds and two nsqlookupds, in a process of its own."""
    topic = _new_topic()
    with ClusterProcess(nodes=3, lookupds=2) as cluster:
        cluster.create_topic(topic, _PARTITIONS, 2, channels=[CHANNEL], ordered=True)
        found = _known_by(cluster.lookupds, servers)
        yield Place("embedded redesigned cluster", found, (), topic, lambda: cluster.move_leader(topic, 0))


@contextmanager
def existing_cluster(lookup: Lookup, servers: Servers) -> Iterator[Place]:
    """A topic of its own on a cluster in use, deleted afterwards. Leaders stay where they are.

    Raises NsqError when the topic cannot be created, or is not ready in time.
    """
    topic, replicas = _new_topic(), min(2, lookup.count_nodes())
    lookup.tell_leader("create", topic, partition_num=_PARTITIONS, replicator=replicas, orderedmulti="true")
    try:
        deadline = monotonic() + _READY_TIMEOUT
        while len(places := lookup.places_or_none(topic)) < _PARTITIONS:
            if monotonic() > deadline:
                raise NsqError(f"topic {topic}: not all of its partitions had a leader after {_READY_TIMEOUT:.0f} s")
            sleep(_READY_POLL)
        for result in lookup.tell(places, "create", topic, CHANNEL):  # without a channel a partition takes no publishes
            if not result.is_done:
                raise NsqError(f"topic {topic}: {result.error}")
        yield Place(f"nsqlookupd {', '.join(map(str, servers.lookupds))}", servers, (), topic)
    finally:
        with suppress(NsqError):
            lookup.tell_leader("delete", topic, partition="**")


def _new_topic() -> str:
    return f"demo-ordered-{uuid4().hex[:8]}"


# The accounts


_OK, _FIN, _AGAIN, _GIVEN_UP = 1, 2, 4, 8


class Ledger:
    """Marks for the sequence numbers 0 to ``size - 1``: a publish that was answered OK, FINs, a give-up.

    A message is lost that was published OK, and never finished nor given up; duplicated that was finished more than
    once. Marks are made where the fact is known: OK after the reply, FIN when the handler has decided it.

    Attributes:
        published, publish_failed: messages answered OK, and those that were not (one may be stored all the same).
        delivered: calls of handlers.
        settled: messages finished or given up at least once.
        events: how often handlers failed, requeued, touched, answered later.
        latencies: nanoseconds from publish to first delivery.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.published: int = 0
        self.publish_failed: int = 0
        self.delivered: int = 0
        self.settled: int = 0
        self.events: Counter[str] = Counter()
        self.latencies: array[int] = array("q")
        self._marks = bytearray(size)

    def account(self, numbers: range, publish: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Publish these messages by a call, and mark what came of it."""
        try:
            publish(*arguments, **options)
        except NsqError:
            self.publish_failed += len(numbers)
        else:
            for number in numbers:
                self._marks[number] |= _OK
            self.published += len(numbers)

    def mark_finished(self, number: int) -> None:
        """The handler of this message decided on FIN."""
        self._settle(number, _AGAIN if self._marks[number] & _FIN else _FIN)

    def mark_given_up(self, number: int) -> None:
        self._settle(number, _GIVEN_UP)

    def _settle(self, number: int, mark: int) -> None:
        self.settled += not self.is_settled(number)
        self._marks[number] |= mark

    def is_settled(self, number: int) -> bool:
        """Whether this message was finished or given up."""
        return self._marks[number] > _OK

    @property
    def moves(self) -> int:
        """Grows as long as anything happens."""
        return self.delivered + self.published + self.publish_failed

    @property
    def is_whole(self) -> bool:
        """Whether everything that was answered OK is settled."""
        return self.settled >= self.published and not self.lost

    @property
    def lost(self) -> int:
        """Messages answered OK and not settled."""
        return self._marks.count(_OK)

    @property
    def finished(self) -> int:
        """Messages finished at least once."""
        return self._many(_FIN)

    @property
    def duplicated(self) -> int:
        """Messages finished more than once."""
        return self._many(_AGAIN)

    @property
    def given_up(self) -> int:
        return self._many(_GIVEN_UP)

    def _many(self, mark: int) -> int:
        return sum(many for marks, many in Counter(self._marks).items() if marks & mark)


class Job(ABC):
    """What the jobs have in common. ``title`` says what it is."""

    title: str

    def __init__(self, place: Place, messages: int) -> None:
        self.place = place
        self.ledger: Ledger = Ledger(messages)

    @abstractmethod
    def run(self, stop: Event, tell: Tell) -> Results:
        """Do the job; return when all is settled, when nothing moves any more, or when ``stop`` is set.

        Args:
            tell: called about ten times a second.

        Raises NsqError when the servers cannot be used at all.
        """

    def _watch(self, at_work: Sequence[Greenlet[..., Any]], stop: Event, tell: Tell) -> Results:
        """Wait until what is at work has ended, and all is settled: ``done``; ``stalled`` when nothing has moved for
        STALL_TIMEOUT, or ``interrupted`` by ``stop``."""
        ledger = self.ledger
        began = moved_at = perf_counter()
        ended, seen = "interrupted", -1
        while not stop.is_set():
            joinall(at_work, timeout=_TICK, raise_error=True)
            if all(each.dead for each in at_work):
                if ledger.is_whole:
                    ended = "done"
                    break
                stop.wait(_LATER)
            tell(ledger)
            if ledger.moves != seen:
                moved_at, seen = perf_counter(), ledger.moves
            elif perf_counter() - moved_at > STALL_TIMEOUT:
                ended = "stalled"
                break
        return {"ended": ended, "seconds": round(perf_counter() - began, 3)}

    def _results(self, watched: Results) -> Results:
        """What came of it; when it was interrupted messages are still on their way, so that ``lost`` is None."""
        counts = ("published", "publish_failed", "delivered", "finished", "lost", "duplicated")
        found = {**watched, **{name: getattr(self.ledger, name) for name in counts}, "server": self.place.name}
        found["messages_per_second"] = round(self.ledger.finished / max(watched["seconds"], 0.001), 1)
        return {**found, "lost": None} if found["ended"] == "interrupted" else found

    def is_good(self, results: Results) -> bool:
        return results["ended"] == "done" and not (results["lost"] or results["publish_failed"])


# On original servers

_HEAD = struct.Struct(">QQ")  # sequence number; perf_counter_ns when published, 0: latency is not measured
_BATCH = 100
_WINDOW = 20_000  # messages that may be unsettled: the latency is to be that of a system at work, not of a backlog
_POLL = 0.002
_LATER = 0.02


class DeliberateFailure(Exception):
    """What a handler raises to fail a message on purpose."""


class MainJob(Job):
    """One run of the job. ``topics`` are fresh names, so that servers in use are not disturbed."""

    def __init__(self, place: Place, messages: int, topics: int) -> None:
        super().__init__(place, messages)
        run = uuid4().hex[:8]
        self.topics: list[str] = [f"demo-{run}-{number}" for number in range(topics)]
        self.title: str = f"{counted(topics, 'topic')}, {place.name}"
        self._padding = b"." * (BODY_SIZE - _HEAD.size)
        self._is_running = True
        self._later: list[tuple[Message, int]] = []

    def run(self, stop: Event, tell: Tell) -> Results:
        consumers = [self._consumer(topic) for topic in self.topics]
        with Producer(**self.place.servers.of_client, lookupd_poll_interval=1.0) as producer:
            size, count = self.ledger.size, len(self.topics)
            edges = [size * number // count for number in range(count + 1)]
            parts = zip(self.topics, edges, edges[1:], strict=False)
            publishers: list[Greenlet[..., Any]] = [spawn(self._publish_topic, producer, *part) for part in parts]
            for consumer in consumers:
                consumer.start(block=False)
            later: Greenlet[..., Any] = spawn(self._answer_later)
            try:
                watched = self._watch(publishers, stop, tell)
            finally:
                self._is_running = False
                joinall([*publishers, later], timeout=_CLOSE_TIMEOUT)
                joinall([spawn(consumer.close, drain=True, timeout=_CLOSE_TIMEOUT) for consumer in consumers])
        tell(self.ledger)
        results = self._results(watched)
        results["left_on_server"] = None if stop.is_set() else self.place.left(self.topics)
        self.place.delete(self.topics)
        return results

    def is_good(self, results: Results) -> bool:
        return super().is_good(results) and not results["left_on_server"]

    def _results(self, watched: Results) -> Results:
        ledger, events = self.ledger, self.ledger.events
        times = ledger.latencies
        percentiles = statistics.quantiles(times, n=100, method="inclusive") if len(times) > 1 else None
        return {
            **super()._results(watched),
            "failed": events["failed"],
            "requeued": events["requeued"] + events["failed"],
            "touched": events["touched"],
            "answered_later": events["answered_later"],
            "given_up": ledger.given_up,
            "latency_p50_ms": percentiles and percentiles[49] / 1e6,
            "latency_p99_ms": percentiles and percentiles[98] / 1e6,
        }

    # Publishing

    def _publish_topic(self, producer: Producer, topic: str, first: int, last: int) -> None:
        """Publish one by one, deferred, and in batches, by turns."""
        account = self.ledger.account
        for turn, start in enumerate(range(first, last, _BATCH)):
            while self._is_running and self.ledger.published - self.ledger.settled > _WINDOW:
                sleep(_POLL)
            if not self._is_running:
                return
            numbers = range(start, min(last, start + _BATCH))
            if turn % 20 == 10:
                for number in numbers:
                    body = self._body(number, perf_counter_ns())
                    account(range(number, number + 1), producer.publish, topic, body)
            elif turn % 100 == 50:
                for number in numbers:
                    account(range(number, number + 1), producer.publish, topic, self._body(number), defer=50)
            else:
                now = perf_counter_ns()
                account(numbers, producer.multipublish, topic, [self._body(number, now) for number in numbers])

    def _body(self, number: int, published_at: int = 0) -> bytes:
        return _HEAD.pack(number, published_at) + self._padding

    # Handling

    def _consumer(self, topic: str) -> Consumer:
        # Failures are deliberate here: backoff would only measure itself, and requeues are to come back soon.
        consumer = Consumer(
            topic,
            CHANNEL,
            **self.place.servers.of_client,
            message_handler=self._handle,
            max_tries=MAX_TRIES,
            max_in_flight=2000,
            max_backoff_duration=0,
            requeue_base_delay=0.05,
            requeue_max_delay=0.2,
            lookupd_poll_interval=0.2,
        )
        consumer.on_giving_up.connect(self._given_up, weak=False)
        return consumer

    def _handle(self, _consumer: Consumer, message: Message) -> None:
        number, published_at = _HEAD.unpack_from(message.body)
        ledger = self.ledger
        ledger.delivered += 1
        if published_at and message.attempts == 1:
            ledger.latencies.append(perf_counter_ns() - published_at)
        action = _PLAN[number % len(_PLAN)]
        if action == "later":
            message.enable_async()
            self._later.append((message, number))
            return
        elif action == "touch":
            message.touch()
            ledger.events["touched"] += 1
        elif action == "fail always" or (action == "fail" and message.attempts == 1):
            ledger.events["failed"] += 1
            raise DeliberateFailure(number)
        elif action == "requeue" and message.attempts == 1:
            ledger.events["requeued"] += 1
            raise RequeueMessage(0.01)
        ledger.mark_finished(number)

    def _answer_later(self) -> None:
        """Finish what the handler has left to it, until nothing comes any more."""
        while self._is_running or self._later:
            sleep(_LATER)
            waiting, self._later = self._later, []
            for message, number in waiting:
                with suppress(NsqError):  # the connection is gone: nsqd delivers the message again
                    message.finish()
                    self.ledger.events["answered_later"] += 1
                    self.ledger.mark_finished(number)

    def _given_up(self, _consumer: Any, message: Message) -> None:
        self.ledger.mark_given_up(_HEAD.unpack_from(message.body)[0])


def _plan() -> list[str]:
    """What happens to the messages whose number has a given remainder."""
    plan = ["finish"] * 1000
    plan[500] = "fail always"
    for action, first in (("fail", 101), ("requeue", 211), ("touch", 307), ("later", 401), ("later", 601)):
        plan[first : first + 50 : 10] = [action] * 5
    return plan


_PLAN = _plan()


# On an ordered topic of a redesigned cluster

_NUMBER = struct.Struct(">Q")
_PIPELINE = 20


class OrderedJob(Job):
    """One run, on a topic that exists, with as many messages for each key. A message that comes again is a duplicate,
    not a violation of the order. ``trace_file`` is where the traces go."""

    def __init__(self, place: Place, messages: int, trace_file: Path, keys: int = 20) -> None:
        self._each = max(1, messages // keys)
        super().__init__(place, self._each * keys)
        self.title: str = f"{keys} keys, an ordered topic, {place.name}"
        self._trace_file = trace_file
        self._moves = 0
        self._last = [-1] * keys
        self._violations = 0
        self._padding = b"." * (BODY_SIZE - _NUMBER.size)

    def run(self, stop: Event, tell: Tell) -> Results:
        logger = logging.Logger("nsq_fast.demo.trace")
        file, trace = log_to_file(self._trace_file, max_bytes=0, log=logger), TraceLog(logger)
        trace.enable()
        common: dict[str, Any] = {**self.place.servers.of_client, "trace": trace}
        handling: dict[str, Any] = {"message_handler": self._handle, "max_tries": 0, "max_in_flight": 100}
        consumer = Consumer(self.place.topic, CHANNEL, **handling, **common)
        with Producer(publish_timeout=STALL_TIMEOUT, **common) as producer:
            consumer.start(block=False)
            greenlets: list[Greenlet[..., Any]] = [
                *(spawn(self._publish, producer, key) for key in range(len(self._last))),
                spawn(self._move_in_the_middle),
            ]
            try:
                watched = self._watch(greenlets, stop, tell)
            finally:
                for greenlet in greenlets:
                    greenlet.kill()
                consumer.close()
                file.close()
        tell(self.ledger)
        return self._results(watched)

    def _publish(self, producer: Producer, key: int) -> None:
        first, last = key * self._each, (key + 1) * self._each
        for start in range(first, last, _PIPELINE):
            numbers = range(start, min(last, start + _PIPELINE))
            results = [
                producer.publish_nowait(self.place.topic, _NUMBER.pack(number) + self._padding, key=f"key{key}")
                for number in numbers
            ]
            for number, result in zip(numbers, results, strict=True):
                self.ledger.account(range(number, number + 1), result.get)

    def _move_in_the_middle(self) -> None:
        if self.place.move is None:
            return
        while self.ledger.published < self.ledger.size // 2:
            sleep(_TICK / 10)
        self.place.move()
        self._moves += 1

    def _handle(self, _consumer: Consumer, message: Message) -> None:
        (number,) = _NUMBER.unpack_from(message.body)
        ledger, key = self.ledger, number // self._each
        ledger.delivered += 1
        if not ledger.is_settled(number):
            self._violations += number < self._last[key]
            self._last[key] = max(self._last[key], number)
        ledger.mark_finished(number)

    def _results(self, watched: Results) -> Results:
        """``traces_joined`` counts the publishes of which there is a record of the consumption too."""
        published, consumed = [], set()
        with self._trace_file.open() as lines:
            for record in read_records(lines):
                if isinstance(record, PublishRecord):
                    published.append(_identity(record))
                elif isinstance(record, ConsumeRecord):
                    consumed.add(_identity(record))
        return {
            **super()._results(watched),
            "order_violations": self._violations,
            "leader_moves": self._moves,
            "traces_published": len(published),
            "traces_joined": sum(each in consumed for each in published),
        }

    def is_good(self, results: Results) -> bool:
        are_traced = results["traces_joined"] == results["traces_published"] == results["published"]
        return super().is_good(results) and are_traced and not results["order_violations"]


def _identity(record: TraceRecord) -> tuple[Any, ...]:
    """What the records of one message have in common, wherever it was consumed."""
    return record.partition, record.internal_id, record.trace_id, record.offset, record.size
