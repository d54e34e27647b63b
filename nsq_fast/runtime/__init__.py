"""The gevent runtime: the only layer that owns sockets, clocks and greenlets.

The names below are what the layers above may use of it: ``gnsq``, ``spark``,
``broker``, ``bench``, ``cli`` and ``testing`` import them from here, and nothing
from the modules below. Those that are public are names of ``nsq_fast``, too; the
others may change from one version to the next.

A name is resolved when it is first used, so that a program loads the parts that
it uses and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast._lazy import lazy_names
from nsq_fast._per_interpreter import require_main_interpreter

if TYPE_CHECKING:
    from nsq_fast.client.acknowledger import NO_LIMIT as NO_LIMIT
    from nsq_fast.client.acknowledger import Acknowledger as Acknowledger
    from nsq_fast.client.admin import AdminClient as AdminClient
    from nsq_fast.client.admin import ClusterAdmin as ClusterAdmin
    from nsq_fast.client.admin import LookupdHTTPClient as LookupdHTTPClient
    from nsq_fast.client.admin import LookupPoller as LookupPoller
    from nsq_fast.client.admin import NsqdHTTPClient as NsqdHTTPClient
    from nsq_fast.client.admin import PartitionResult as PartitionResult
    from nsq_fast.client.consumer import ConsumerOptions as ConsumerOptions
    from nsq_fast.client.flow import Flow as Flow
    from nsq_fast.client.handlers import Handler as Handler
    from nsq_fast.client.handlers import check_handler as check_handler
    from nsq_fast.client.histogram import HistogramStats as HistogramStats
    from nsq_fast.client.http import Endpoint as Endpoint
    from nsq_fast.client.http import HttpClient as HttpClient
    from nsq_fast.client.http import parse_endpoint as parse_endpoint
    from nsq_fast.client.layers import DeflateLayer as DeflateLayer
    from nsq_fast.client.layers import Layer as Layer
    from nsq_fast.client.layers import SnappyLayer as SnappyLayer
    from nsq_fast.client.layers import client_context as client_context
    from nsq_fast.client.layers import server_hostname as server_hostname
    from nsq_fast.client.message_signals import MessageSignals as MessageSignals
    from nsq_fast.client.message_signals import SignalBook as SignalBook
    from nsq_fast.client.signals import LazySignal as LazySignal
    from nsq_fast.client.signals import receivers as receivers
    from nsq_fast.client.stats import ConsumerStats as ConsumerStats
    from nsq_fast.client.subscriptions import Subscriber as Subscriber
    from nsq_fast.client.trace import LOGGER_NAME as LOGGER_NAME
    from nsq_fast.client.trace import TraceLog as TraceLog
    from nsq_fast.client.trace import log_to_file as log_to_file
    from nsq_fast.client.trace import new_trace_id as new_trace_id
    from nsq_fast.client.trace import trace_log as trace_log
    from nsq_fast.client.trace_records import ConsumeRecord as ConsumeRecord
    from nsq_fast.client.trace_records import PublishRecord as PublishRecord
    from nsq_fast.client.trace_records import TraceRecord as TraceRecord
    from nsq_fast.protocol.publishing import Receipt as Receipt

    from .column_producer import ColumnProducer as ColumnProducer
    from .column_producer import StoredRows as StoredRows
    from .column_producer import TopicLayout as TopicLayout
    from .column_subscription import ColumnSubscription as ColumnSubscription
    from .connection import Connection as Connection
    from .consumer import Consumer as Consumer
    from .crossing.consuming import CrossingConsumer as CrossingConsumer
    from .crossing.hub_thread import HubThread as HubThread
    from .crossing.place import Place as Place
    from .crossing.reply import Reply as Reply
    from .fork import Greenlet as Greenlet
    from .handler_threads import Batch as Batch
    from .handler_threads import BatchCursor as BatchCursor
    from .handler_threads import TakenBatches as TakenBatches
    from .owner_thread import get_ident as get_ident
    from .producer import Producer as Producer
    from .waiting import is_interrupting as is_interrupting

require_main_interpreter()

_HOME = {
    # Clients
    "Consumer": "consumer",
    "Producer": "producer",
    "ColumnProducer": "column_producer",
    "TopicLayout": "column_producer",
    "ColumnSubscription": "column_subscription",
    "LookupdHTTPClient": ".client.admin",
    "NsqdHTTPClient": ".client.admin",
    "AdminClient": ".client.admin",
    "ClusterAdmin": ".client.admin",
    "PartitionResult": ".client.admin",
    "LookupPoller": ".client.admin",
    # What gnsq's Consumer, Message and connection are made of
    "Connection": "connection",
    "Acknowledger": ".client.acknowledger",
    "Handler": ".client.handlers",
    "NO_LIMIT": ".client.acknowledger",
    "Flow": ".client.flow",
    "Subscriber": ".client.subscriptions",
    "LazySignal": ".client.signals",
    "receivers": ".client.signals",
    "MessageSignals": ".client.message_signals",
    "SignalBook": ".client.message_signals",
    "Layer": ".client.layers",
    "DeflateLayer": ".client.layers",
    "SnappyLayer": ".client.layers",
    "client_context": ".client.layers",
    "server_hostname": ".client.layers",
    # HTTP
    "Endpoint": ".client.http",
    "HttpClient": ".client.http",
    "parse_endpoint": ".client.http",
    # Publishing rows, and their traces
    "Receipt": ".protocol.publishing",
    "StoredRows": "column_producer",
    "TraceLog": ".client.trace",
    "TraceRecord": ".client.trace_records",
    "ConsumeRecord": ".client.trace_records",
    "PublishRecord": ".client.trace_records",
    "LOGGER_NAME": ".client.trace",
    "log_to_file": ".client.trace",
    "new_trace_id": ".client.trace",
    # Clients in a hub thread, for other threads
    "HubThread": "crossing.hub_thread",
    "Place": "crossing.place",
    "get_ident": "owner_thread",
    "is_interrupting": "waiting",
    "trace_log": ".client.trace",
    "Reply": "crossing.reply",
    "CrossingConsumer": "crossing.consuming",
    "ConsumerOptions": ".client.consumer",
    "check_handler": ".client.handlers",
    "Batch": "handler_threads",
    "TakenBatches": "handler_threads",
    "BatchCursor": "handler_threads",
    # What metrics are made of
    "ConsumerStats": ".client.stats",
    "HistogramStats": ".client.histogram",
    # Greenlets that survive a fork
    "Greenlet": "fork",
}

__all__ = [*_HOME]

__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
