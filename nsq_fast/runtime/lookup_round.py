"""One round of lookup: all lookupds are asked at once about some topics, each of which is due at a time of its own.

A topic is due again after the poll interval; sooner when no lookupd answered,
or when no lookupd knows it although a consumer waits for it.
"""

from __future__ import annotations

import logging
import random
from time import monotonic

import msgspec
from gevent.event import Event

from nsq_fast.config import LookupConfig
from nsq_fast.errors import HttpError, NsqError
from nsq_fast.log_events import DISCOVERY_EXCLUDED, DISCOVERY_FAILED, LOOKUP_UNANSWERED, TOPIC_FOUND, TOPIC_UNKNOWN
from nsq_fast.printable import printable
from nsq_fast.protocol.discovery import Keep, left_out, only
from nsq_fast.protocol.lookup_schedule import TopicSchedule
from nsq_fast.protocol.topology import LookupAnswer, Topology, merge

from .lookupd import Lookupd
from .supervised import FAULTS, Supervisor

log = logging.getLogger("nsq_fast.lookup")


class PolledTopic(TopicSchedule):
    """A topic that is polled for.

    Args:
        keep: the nsqds that are used, of those that lookup names; None: all.

    Attributes:
        is_sought: whether it is asked for more often as long as nobody knows it.
        topology: what the last good round said; None before there was one.
        ready: set when there is a topology, or there will be none.
        asked_at, due: as a TopicSchedule has them, in monotonic time.
        round_number: the latest round that it was published of.
    """

    def __init__(self, name: str, config: LookupConfig, keep: Keep | None = None, is_sought: bool = True) -> None:
        super().__init__(config)
        self.name = name
        self.is_sought = is_sought
        self.topology: Topology | None = None
        self.ready = Event()
        self.round_number = 0
        self._keep = keep
        self._agreed: LookupAnswer | None = None
        self._named: Topology | None = None
        self._is_filter_bad = False

    def learn(self, answers: list[LookupAnswer]) -> Topology:
        """Unite the answers of one round. The topology is the same object while nothing has changed."""
        self.failures = 0
        first = answers[0]
        is_agreed = all(answer == first for answer in answers)
        if self._named is None or not is_agreed or first != self._agreed:
            self._agreed = first if is_agreed else None
            self._named = merge(answers)
        found = self._named if self._keep is None else self._filtered(self._named, self._keep)
        if self.topology is None or found != self.topology:
            self._tell_excluded(found)
            self.topology = found
        self.ready.set()
        return self.topology

    def _tell_excluded(self, found: Topology) -> None:
        """Log which partitions are left out: nobody may be aware of it. That none is left is said elsewhere."""
        partitions = found.excluded_partitions
        if (
            partitions
            and not found.is_empty
            and (self.topology is None or partitions != self.topology.excluded_partitions)
        ):
            log.warning("topic %s: %s", self.name, left_out(partitions), extra=DISCOVERY_EXCLUDED)

    def _filtered(self, named: Topology, keep: Keep) -> Topology:
        """What the filter leaves. One that raises leaves what was known before: nothing at first."""
        try:
            found = only(named, keep)
        except Exception as error:  # a user's function
            if not self._is_filter_bad:
                log.exception(
                    "discovery_filter failed for topic %s; what was known of it is kept",
                    self.name,
                    extra=DISCOVERY_FAILED,
                )
            self._is_filter_bad = True
            problem = f"discovery_filter failed: {printable(repr(error))}"
            return self.topology or Topology(problem=problem, excluded=named.nsqds)
        self._is_filter_bad = False
        return found

    def unanswered(self, now: float, chance: float) -> None:
        """No lookupd answered: what is known stays, and the next question comes sooner."""
        if not self.failures:
            log.warning(
                "no lookupd answers for topic %s; what was known of it is kept", self.name, extra=LOOKUP_UNANSWERED
            )
        super().unanswered(now, chance)

    def missing(self, now: float, chance: float) -> None:
        """No lookupd names an nsqd for it, and its first message may come at any moment: ask again soon."""
        if not self.searches:
            if self.topology is not None and self.topology.excluded:
                log.warning(
                    "topic %s: %s; asking again until one is left",
                    self.name,
                    self.topology.problem,
                    extra=DISCOVERY_EXCLUDED,
                )
            else:
                log.warning(
                    "no nsqlookupd knows topic %s yet; asking again until one does", self.name, extra=TOPIC_UNKNOWN
                )
        super().missing(now, chance)

    def found(self, topology: Topology) -> None:
        """Some lookupd knows it."""
        if self.searches:
            self.searches = 0
            nsqds = topology.nsqds
            log.warning(
                "topic %s is known now: %d nsqds, first %s", self.name, len(nsqds), nsqds[0].tcp, extra=TOPIC_FOUND
            )


class LookupRound:
    """One question to all lookupds at once, about some topics.

    Attributes:
        number: rounds are numbered in the order in which they start.
        started_at: monotonic time.
        pending: lookupds that have not answered for all topics yet.
        answers: the good answers so far, by topic.
        published: how many of them the topology of a topic was made of.
        chance: in [0, 1): what lengthens the pauses of its topics, all alike, so that they are asked about together.
    """

    def __init__(self, number: int, topics: list[PolledTopic], started_at: float) -> None:
        self.number = number
        self.topics = topics
        self.started_at = started_at
        self.pending = 0
        self.answers: dict[PolledTopic, list[LookupAnswer]] = {}
        self.published: dict[PolledTopic, int] = {}
        self.chance = random.random()

    def is_news(self, topic: PolledTopic) -> bool:
        """Whether answers for a topic have come that are not published, and no later round has been."""
        count = len(self.answers[topic])
        return count != self.published.get(topic, 0) and topic.round_number <= self.number

    def ask(self, lookupd: Lookupd, supervisor: Supervisor) -> int:
        """Ask a lookupd topic by topic: one that it cannot answer says nothing of the others, silence does.

        Returns how many questions got no good answer.
        """
        failure: _Failure | None = None
        has_answered = False
        failures = 0
        for topic in self.topics:
            answer = _answer_of(lookupd, topic.name, supervisor)
            if isinstance(answer, LookupAnswer):
                has_answered = True
                self.answers.setdefault(topic, []).append(answer)
                continue
            failure = answer
            failures += 1
            if failure.is_silence:
                break
        if has_answered or failure is None:
            lookupd.succeeded()
        else:
            lookupd.failed_for(failure.text, monotonic())
        return failures


class _Failure(msgspec.Struct, frozen=True):
    """Why a lookupd gave no answer. Not the exception: its traceback would keep a huge reply alive."""

    text: str
    is_silence: bool


def _answer_of(lookupd: Lookupd, topic: str, supervisor: Supervisor) -> LookupAnswer | _Failure:
    try:
        return lookupd.lookup(topic)
    except NsqError as error:
        return _Failure(str(error), isinstance(error, HttpError) and error.status is None)
    except FAULTS as fault:
        supervisor.report(f"lookup of {topic} at {lookupd.endpoint}", fault, "the other topics are asked")
        return _Failure(printable(repr(fault)), False)
