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
    from .admin import AdminClient as AdminClient
    from .admin import LookupdHTTPClient as LookupdHTTPClient
    from .admin import NsqdHTTPClient as NsqdHTTPClient
    from .cluster_admin import ClusterAdmin as ClusterAdmin
    from .cluster_admin import PartitionResult as PartitionResult
    from .column_producer import ColumnProducer as ColumnProducer
    from .column_producer import StoredRows as StoredRows
    from .column_producer import TopicLayout as TopicLayout
    from .column_subscription import ColumnSubscription as ColumnSubscription
    from .consumer import Consumer as Consumer
    from .consuming.disposition import NO_LIMIT as NO_LIMIT
    from .consuming.disposition import Disposition as Disposition
    from .consuming.disposition import Handler as Handler
    from .consuming.flow import Flow as Flow
    from .consuming.outside_handlers import Batch as Batch
    from .consuming.outside_handlers import OutsideHandlers as OutsideHandlers
    from .consuming.stats import ConsumerStats as ConsumerStats
    from .consuming.subscriber import Subscriber as Subscriber
    from .crossing.consuming import CrossingConsumer as CrossingConsumer
    from .crossing.hub_thread import HubThread as HubThread
    from .crossing.outside_consumer import OutsideConsumer as OutsideConsumer
    from .crossing.outside_producer import OutsideProducer as OutsideProducer
    from .crossing.outside_watch import OutsideWatch as OutsideWatch
    from .crossing.plain_publishers import task_publisher as task_publisher
    from .crossing.plain_publishers import thread_publisher as thread_publisher
    from .crossing.publishing import CrossingProducer as CrossingProducer
    from .crossing.reply import Reply as Reply
    from .crossing.requests import PlainRequest as PlainRequest
    from .crossing.requests import PublishRequest as PublishRequest
    from .crossing.taken_batches import Cursor as Cursor
    from .crossing.taken_batches import TakenBatches as TakenBatches
    from .fork import Greenlet as Greenlet
    from .histogram import HistogramStats as HistogramStats
    from .lookup import LookupPoller as LookupPoller
    from .message_signals import MessageSignals as MessageSignals
    from .message_signals import SignalBook as SignalBook
    from .net.connection import Connection as Connection
    from .net.http import Endpoint as Endpoint
    from .net.http import HttpClient as HttpClient
    from .net.http import parse_endpoint as parse_endpoint
    from .net.layers import DeflateLayer as DeflateLayer
    from .net.layers import Layer as Layer
    from .net.layers import SnappyLayer as SnappyLayer
    from .net.tls import client_context as client_context
    from .net.tls import server_hostname as server_hostname
    from .net.tls import wrap_socket as wrap_socket
    from .owner_thread import Queued as Queued
    from .producer import Producer as Producer
    from .publishing.compose import extras_of as extras_of
    from .publishing.publish import Receipt as Receipt
    from .signals import LazySignal as LazySignal
    from .signals import receivers as receivers
    from .trace import LOGGER_NAME as LOGGER_NAME
    from .trace import TraceLog as TraceLog
    from .trace import log_to_file as log_to_file
    from .trace import new_trace_id as new_trace_id
    from .trace_records import ConsumeRecord as ConsumeRecord
    from .trace_records import PublishRecord as PublishRecord
    from .trace_records import TraceRecord as TraceRecord

require_main_interpreter()

_HOME = {
    # Clients
    "Consumer": "consumer",
    "Producer": "producer",
    "ColumnProducer": "column_producer",
    "TopicLayout": "column_producer",
    "ColumnSubscription": "column_subscription",
    "LookupdHTTPClient": "admin",
    "NsqdHTTPClient": "admin",
    "AdminClient": "admin",
    "ClusterAdmin": "cluster_admin",
    "PartitionResult": "cluster_admin",
    "LookupPoller": "lookup",
    # What gnsq's Consumer, Message and connection are made of
    "Connection": "net.connection",
    "Disposition": "consuming.disposition",
    "Handler": "consuming.disposition",
    "NO_LIMIT": "consuming.disposition",
    "Flow": "consuming.flow",
    "Subscriber": "consuming.subscriber",
    "LazySignal": "signals",
    "receivers": "signals",
    "MessageSignals": "message_signals",
    "SignalBook": "message_signals",
    "Layer": "net.layers",
    "DeflateLayer": "net.layers",
    "SnappyLayer": "net.layers",
    "client_context": "net.tls",
    "server_hostname": "net.tls",
    "wrap_socket": "net.tls",
    # HTTP
    "Endpoint": "net.http",
    "HttpClient": "net.http",
    "parse_endpoint": "net.http",
    # Publishing rows, and their traces
    "Receipt": "publishing.publish",
    "StoredRows": "column_producer",
    "TraceLog": "trace",
    "TraceRecord": "trace_records",
    "ConsumeRecord": "trace_records",
    "PublishRecord": "trace_records",
    "LOGGER_NAME": "trace",
    "log_to_file": "trace",
    "new_trace_id": "trace",
    # Clients in a hub thread, for other threads
    "HubThread": "crossing.hub_thread",
    "Queued": "owner_thread",
    "Reply": "crossing.reply",
    "task_publisher": "crossing.plain_publishers",
    "thread_publisher": "crossing.plain_publishers",
    "CrossingProducer": "crossing.publishing",
    "PlainRequest": "crossing.requests",
    "PublishRequest": "crossing.requests",
    "extras_of": "publishing.compose",
    "CrossingConsumer": "crossing.consuming",
    "OutsideConsumer": "crossing.outside_consumer",
    "OutsideProducer": "crossing.outside_producer",
    "OutsideWatch": "crossing.outside_watch",
    "OutsideHandlers": "consuming.outside_handlers",
    "Batch": "consuming.outside_handlers",
    "TakenBatches": "crossing.taken_batches",
    "Cursor": "crossing.taken_batches",
    # What metrics are made of
    "ConsumerStats": "consuming.stats",
    "HistogramStats": "histogram",
    # Greenlets that survive a fork
    "Greenlet": "fork",
}

__all__ = [*_HOME]

__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
