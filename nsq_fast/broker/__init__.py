"""Embedded NSQ servers on gevent: for the demo, for tests, and for the tests of programs that use nsq_fast.

    with Broker() as broker:
        Producer(lookupd_http_addresses=[broker.lookupd.http_address])

``Broker`` is the original NSQ, ``RedesignedCluster`` the one with partitions, leaders and replicas;
``BrokerProcess`` and ``ClusterProcess`` run them in a process of their own.

Names are resolved when they are first used, so importing this package imports no gevent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast._lazy import lazy_names

if TYPE_CHECKING:
    from .net.faults import Faults as Faults
    from .net.link import FaultyLink as FaultyLink
    from .options import LookupdOptions as LookupdOptions
    from .options import NsqdOptions as NsqdOptions
    from .redesigned.cluster import RedesignedCluster as RedesignedCluster
    from .redesigned.process import ClusterProcess as ClusterProcess
    from .servers.broker import Broker as Broker
    from .servers.group import serve as serve
    from .servers.lookupd import LookupdServer as LookupdServer
    from .servers.nsqd import NsqdServer as NsqdServer
    from .servers.process import BrokerProcess as BrokerProcess

_HOME = {
    "Broker": "servers.broker",
    "BrokerProcess": "servers.process",
    "ClusterProcess": "redesigned.process",
    "Faults": "net.faults",
    "FaultyLink": "net.link",
    "LookupdOptions": "options",
    "LookupdServer": "servers.lookupd",
    "NsqdOptions": "options",
    "NsqdServer": "servers.nsqd",
    "RedesignedCluster": "redesigned.cluster",
    "serve": "servers.group",
}

__all__ = [*_HOME]


__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
