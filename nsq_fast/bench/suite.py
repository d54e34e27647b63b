"""The scenarios of a whole comparison: what `nsq-fast bench suite` runs, and the names that the goals refer to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from .clients import ASYNCIO, CORE_FLOOR, KEYED, ORDERED_FLOOR, OURS, SPARK, SPARK_FLOOR, THREADS
from .settings import Settings

_OURS = ("nsq_fast", "nsq_fast as gnsq", "go-nsq")
_FACES = (*_OURS, ASYNCIO, THREADS)
_FLOOR = (OURS, CORE_FLOOR)
_BESIDE_FLOOR = (*_OURS, CORE_FLOOR)
_PUBLISH: dict[str, Any] = {"kind": "publish"}
_CONSUME: dict[str, Any] = {"kind": "consume"}
CONNECTIONS = (1, 10, 100)
IN_FLIGHT = (10, 100, 1000, 10_000)
_SPARK = (
    ("stream", "Spark: micro-batches of 250,000 rows, with a journal", 2_000_000),
    ("read", "Spark: a table of 1,000,000 rows, with a journal", 1_000_000),
    ("cold", "Spark: the first table of a session, 400,000 rows", 400_000),
    ("write", "Spark: a write of 2,000,000 rows", 2_000_000),
)


class Plan(msgspec.Struct, frozen=True):
    """A scenario of the suite: its name, what it measures, with which clients (all when empty).

    Plans that follow each other and have the same ``group`` are compared with each other, so they run in turns.
    """

    name: str
    title: str
    settings: Settings
    clients: tuple[str, ...] = ()
    is_short: bool = False
    is_embedded: bool = False
    group: str = ""

    def over_tls(self) -> Plan:
        """The same over TLS."""
        return msgspec.structs.replace(self, settings=msgspec.structs.replace(self.settings, tls=True))


def plans(duration: float, rounds: int) -> list[Plan]:
    """The suite, each client busy for ``duration`` seconds a round."""

    def plan(
        name: str, title: str, clients: tuple[str, ...] = (), short: bool = False, group: str = "", **settings: object
    ) -> Plan:
        made = msgspec.convert({"duration": duration, "rounds": rounds, **settings}, Settings)
        return Plan(name, title, made, clients, short, made.needs_cluster, group)

    def growing(group: str, amount: int, title: str, **settings: Any) -> Plan:
        return plan(f"{group}-{amount}", title, _FLOOR, group=group, **_CONSUME, **settings)

    rate: dict[str, Any] = {"rate": 10_000.0, "duration": max(1.0, duration)}
    return [
        plan("consume", "Consume, 200 bytes", short=True, **_CONSUME),
        plan("consume-1k", "Consume, 1 KiB", _OURS, size=1024, **_CONSUME),
        plan("consume-16k", "Consume, 16 KiB", _OURS, size=16384, **_CONSUME),
        plan("consume-snappy", "Consume, snappy", _BESIDE_FLOOR, compression="snappy", **_CONSUME),
        plan("consume-deflate", "Consume, deflate", _BESIDE_FLOOR, compression="deflate", **_CONSUME),
        plan("consume-tls", "Consume, TLS", _BESIDE_FLOOR, tls=True, **_CONSUME),
        plan(
            "sleep", "Handlers that sleep 5 ms, 100 at once", _FACES, handler_sleep=0.005, concurrency=100, **_CONSUME
        ),
        plan("publish-single", "Publish one at a time", short=True, mode="single", **_PUBLISH),
        plan("publish-concurrent", "Publish, 100 callers", short=True, mode="concurrent", concurrency=100, **_PUBLISH),
        plan("publish-16", "Publish, 16 callers", (*_FACES, "gnsq"), mode="concurrent", concurrency=16, **_PUBLISH),
        plan("publish-rate", "Publish at 10,000/s", ("nsq_fast", ASYNCIO), mode="single", **_PUBLISH, **rate),
        plan("publish-batch", "MPUB x 200", short=True, mode="batch", **_PUBLISH),
        plan("latency", "Publish to handler, 10,000/s", short=True, kind="roundtrip", unbuffered=True, **rate),
        plan("latency-buffered", "The same, nsqd's output buffer on", _OURS, kind="roundtrip", **rate),
        plan(
            "latency-half",
            "Publish to handler, half of the peak rate",
            (OURS, "go-nsq"),
            kind="roundtrip",
            unbuffered=True,
            rate_share=0.5,
            duration=max(1.0, duration),
        ),
        plan("start", "Import, and the first message by lookup", _FLOOR, short=True, kind="start"),
        plan("idle", "100 idle connections", _FACES, kind="idle", connections=100, settle=2.0),
        *(
            growing("connections", many, _connections(many), connections=many, max_in_flight=10_000)
            for many in CONNECTIONS
        ),
        *(growing("in-flight", many, f"{many:,} in flight", max_in_flight=many) for many in IN_FLIGHT),
        plan("ordered", "Ordered, 4 partitions (embedded cluster)", (OURS,), kind="ordered", partitions=4),
        plan("ordered-1", "Ordered, one partition (embedded cluster)", (OURS, ORDERED_FLOOR), kind="ordered"),
        plan(
            "publish-key",
            "Publish with a key, 100 callers, 4 partitions (embedded cluster)",
            (OURS, KEYED),
            mode="concurrent",
            concurrency=100,
            partitions=4,
            **_PUBLISH,
        ),
        *(
            plan(f"spark-{mode}", title, (SPARK, SPARK_FLOOR), kind="spark", mode=mode, count=count)
            for mode, title, count in _SPARK
        ),
    ]


def _connections(many: int) -> str:
    return "1 connection" if many == 1 else f"{many:,} connections"


def in_turns(todo: Iterable[Plan]) -> Iterator[list[Plan]]:
    """Those that take turns, together; each other one alone."""
    for _, together in groupby(todo, key=lambda plan: plan.group or plan.name):
        yield list(together)


def titles() -> dict[str, str]:
    """The title of each scenario by its name."""
    return {plan.name: plan.title for plan in plans(1.0, 1)}
