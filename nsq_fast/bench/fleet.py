"""The simulation of fleets, checked: small cases on real nsqds of this machine, and how far the curves are apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from gevent import sleep
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.runtime import Consumer, Producer
from nsq_fast.simulation.comparison import CASES, PROBE, Case, delay_of, deviation, length, mean, simulated, united
from nsq_fast.simulation.events import Curve

from . import binaries

AGREES = 0.10
"""The largest distance of the curves, as a share of all messages, with which the simulation counts as true."""

_BATCH = 500
_TOPIC, _CHANNEL = "fleet", "ch"
_INTERVAL = 0.1
_SEEDS = 9
_NEVER = 65_535
"""Attempts after which a message is given up: none has as many."""


class Check(NamedTuple):
    """One case, both ways.

    Attributes:
        distance: the largest of the cumulative curves, as a share of all messages.
        simulated, measured: seconds until the last message was handled, the first on average.
    """

    case: Case
    distance: float
    simulated: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether the curves are close enough."""
        return self.distance <= AGREES


def check(folder: Path, cases: tuple[Case, ...] = CASES) -> Iterator[Check]:
    """Run each case on nsqds of ``folder``, and in virtual time."""
    delay = delay_of(length(measured(PROBE, folder).curves))
    for case in cases:
        real, starts = measured(case, folder)
        models = [simulated(case, seed, _INTERVAL, delay, starts) for seed in range(_SEEDS)]
        until = max(map(length, [real, *models])) + _INTERVAL
        model = mean([united(each, until) for each in models])
        yield Check(case, deviation(model, united(real, until)), sum(map(length, models)) / _SEEDS, length(real))


class Measured(NamedTuple):
    """A run on real nsqds. Times begin with the first message.

    Attributes:
        curves: when the messages of each nsqd were handled.
        starts: when each consumer got its first message. Connecting takes its time, which is no policy's doing.
    """

    curves: list[Curve]
    starts: list[float]


def measured(case: Case, folder: Path) -> Measured:
    """Run consumers of this process on real nsqds."""
    with ExitStack() as stack:
        nsqds = [stack.enter_context(binaries.nsqd(folder, "127.0.0.1")).tcp for _ in range(case.nsqds)]
        for number, address in enumerate(nsqds):
            with Producer(str(address)) as producer:
                for begin in range(0, case.backlog(number), _BATCH):
                    count = min(_BATCH, case.backlog(number) - begin)
                    producer.multipublish(_TOPIC, [b"%d" % number] * count)
        return _consumed(case, [str(address) for address in nsqds])


def _consumed(case: Case, nsqds: list[str]) -> Measured:
    curves = [Curve(_INTERVAL) for _ in nsqds]
    done = Event()
    begins: dict[Consumer, float] = {}

    def handler(consumer: Consumer, message: Message) -> None:
        begins.setdefault(consumer, monotonic())
        begin = min(begins.values())
        if monotonic() - begin < case.fails_until:
            raise ValueError("the downstream is bad, as the case has it")
        sleep(case.handler)
        curves[int(message.body)].add(monotonic() - begin)
        if sum(curve.total for curve in curves) >= case.total:
            done.set()

    consumers = [
        Consumer(
            _TOPIC,
            _CHANNEL,
            nsqds,
            message_handler=handler,
            max_tries=_NEVER,
            max_in_flight=case.max_in_flight,
            requeue_delay=0,
            low_ready_idle_timeout=case.idle_timeout,
            max_backoff_duration=case.max_backoff,
        )
        for _ in range(case.consumers)
    ]
    for consumer in consumers:
        consumer.start(block=False)
    done.wait()
    for consumer in consumers:
        consumer.close()
    begin = min(begins.values())
    end = max(begin + curve.end for curve in curves)
    return Measured(curves, [begins.get(consumer, end) - begin for consumer in consumers])
