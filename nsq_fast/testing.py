"""A pytest plugin for programs that use nsq_fast, and for nsq_fast itself.

Fixtures:
    nsq_broker    an embedded nsqd with an nsqlookupd, fresh for the test; the marker
                  ``nsq_broker(preserve_order=True)`` gives it options of ``Broker``
    nsq_cluster   an embedded cluster of the redesigned NSQ; the marker ``nsq_cluster(nodes=2)`` gives it options of
                  ``RedesignedCluster``
    nsq_link      a factory of faulty links: TCP proxies that delay, split, stall, refuse, garble and cut

They run in a thread of their own: tests of programs on gevent, in threads, on asyncio, and in other processes use them.

Nothing of gevent is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ImportError as _error:
    raise ImportError("nsq_fast.testing has fixtures for pytest: pip install pytest") from _error

if TYPE_CHECKING:
    from .broker import Broker, RedesignedCluster
    from .broker import FaultyLink as FaultyLink
    from .names import Address


def __getattr__(name: str) -> Any:
    if name != "FaultyLink":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .broker import FaultyLink

    return FaultyLink


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the marker."""
    config.addinivalue_line("markers", "nsq_broker(**options): options of the Broker of the fixture nsq_broker")
    config.addinivalue_line("markers", "nsq_cluster(**options): options of the RedesignedCluster of nsq_cluster")


@pytest.fixture
def nsq_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """An embedded nsqd and nsqlookupd in this process, stopped after the test."""
    from .broker import Broker, InThread

    arguments, options = _marked(request, "nsq_broker")
    with InThread(Broker, *arguments, **options) as broker:
        yield broker


@pytest.fixture
def nsq_cluster(request: pytest.FixtureRequest) -> Iterator[RedesignedCluster]:
    """An embedded cluster of the redesigned NSQ in this process, stopped after the test."""
    from .broker import InThread, RedesignedCluster

    arguments, options = _marked(request, "nsq_cluster")
    with InThread(RedesignedCluster, *arguments, **options) as cluster:
        yield cluster


def _marked(request: pytest.FixtureRequest, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    marker = request.node.get_closest_marker(name)
    return (marker.args, marker.kwargs) if marker is not None else ((), {})


@pytest.fixture
def nsq_link() -> Iterator[Callable[[Address | str], FaultyLink]]:
    """A factory: ``nsq_link(address)`` gives a FaultyLink to that address, closed after the test."""
    from .broker import FaultyLink, HubThread

    links: list[FaultyLink] = []
    with HubThread() as thread:

        def make(target: Address | str) -> FaultyLink:
            links.append(thread.make(FaultyLink, target))
            return links[-1]

        yield make
        for link in links:
            link.close()
