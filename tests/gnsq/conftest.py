"""Consumers of the drop-in, which are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.scripted_nsqd import ScriptedNsqd

from nsq_fast import gnsq


@pytest.fixture
def make_consumer(nsqd: ScriptedNsqd) -> Iterator[Callable[..., Any]]:
    """Make a consumer of the scripted nsqd, not started; closed after the test."""
    made: list[Any] = []

    def make(kind: Any = gnsq.Consumer, **options: Any) -> Any:
        defaults = {"nsqd_tcp_addresses": str(nsqd.address), "max_in_flight": 10, "max_backoff_duration": 0}
        made.append(kind("topic", "channel", **{**defaults, **options}))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close(drain=False)
