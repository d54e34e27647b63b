"""A pytest plugin for programs that use nsq_fast, and for nsq_fast itself.

Fixtures:
    nsq_broker    an embedded nsqd with an nsqlookupd, fresh for the test
    nsq_link      a factory of faulty links: TCP proxies that delay, split, stall and cut

Nothing of gevent is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ImportError as error:
    raise ImportError("nsq_fast.testing has fixtures for pytest: pip install pytest") from error

if TYPE_CHECKING:
    from .broker import Broker
    from .broker import FaultyLink as FaultyLink
    from .names import Address


def __getattr__(name: str) -> Any:
    if name != "FaultyLink":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .broker import FaultyLink

    return FaultyLink


@pytest.fixture
def nsq_broker() -> Iterator[Broker]:
    """An embedded nsqd and nsqlookupd in this process, stopped after the test."""
    from .broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def nsq_link() -> Iterator[Callable[[Address | str], FaultyLink]]:
    """A factory: ``nsq_link(address)`` gives a FaultyLink to that address, closed after the test."""
    from .broker import FaultyLink

    links: list[FaultyLink] = []

    def make(target: Address | str) -> FaultyLink:
        links.append(FaultyLink(target))
        return links[-1]

    yield make
    for link in links:
        link.close()
