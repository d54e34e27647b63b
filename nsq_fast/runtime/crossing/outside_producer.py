"""What the Producers of threads and of asyncio have in common: one in the hub thread, held in another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from nsq_fast.runtime.trace import TraceLog, trace_log

from .hub_thread import HubThread
from .place import Place
from .publishing import CrossingProducer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.keywords import ProducerKeywords

Addresses: TypeAlias = str | Iterable[str | tuple[str, int]]


class OutsideProducer:
    """Base of those Producers."""

    def __init__(
        self,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        *,
        trace: TraceLog = trace_log,
        **options: Unpack[ProducerKeywords],
    ) -> None:
        def make(thread: HubThread) -> CrossingProducer:
            return CrossingProducer(nsqd_tcp_addresses, lookupd_http_addresses, trace=trace, **options).live_in(thread)

        self._place = Place(make, self._renewed)

    def __repr__(self) -> str:
        return repr(self._place.get())

    def _renewed(self, producer: CrossingProducer) -> None:
        """It was made again, in a child of a fork."""
        raise NotImplementedError

    @property
    def nsqd_tcp_addresses(self) -> set[str]:
        """The configured nsqds as 'host:port'."""
        return self._place.get().nsqd_tcp_addresses

    @property
    def is_running(self) -> bool:
        """Whether it takes publishes."""
        return self._place.get().is_running

    @property
    def is_connected(self) -> bool:
        """Whether any nsqd is connected now."""
        return self._place.get().is_connected

    def stats(self) -> dict[str, Any]:
        """As ``nsq_fast.Producer.stats``."""
        producer = self._place.get()
        return self._place.thread.call(producer.stats)
