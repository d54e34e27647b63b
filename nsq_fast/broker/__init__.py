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
    from .net import Faults as Faults
    from .net import FaultyLink as FaultyLink
    from .options import LookupdOptions as LookupdOptions
    from .options import NsqdOptions as NsqdOptions
    from .process import BrokerProcess as BrokerProcess
    from .process import ClusterProcess as ClusterProcess
    from .process import HubThread as HubThread
    from .process import InThread as InThread
    from .redesigned.cluster import RedesignedCluster as RedesignedCluster
    from .servers import Broker as Broker
    from .servers import LookupdServer as LookupdServer
    from .servers import NsqdServer as NsqdServer
    from .servers import serve as serve

_HOME = {
    "Broker": "servers",
    "BrokerProcess": "process",
    "ClusterProcess": "process",
    "Faults": "net",
    "FaultyLink": "net",
    "HubThread": "process",
    "InThread": "process",
    "LookupdOptions": "options",
    "LookupdServer": "servers",
    "NsqdOptions": "options",
    "NsqdServer": "servers",
    "RedesignedCluster": "redesigned.cluster",
    "serve": "servers",
}

__all__ = [*_HOME]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
