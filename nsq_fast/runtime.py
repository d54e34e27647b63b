"""What the layers above the client use of it: names, each imported from where it lives when it is first used.

Those that are public are names of ``nsq_fast``, too; the others may change from one version to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast._lazy import lazy_names

if TYPE_CHECKING:
    from .bridge import Reply as Reply
    from .client.acknowledger import NO_LIMIT as NO_LIMIT
    from .client.acknowledger import Acknowledger as Acknowledger
    from .client.admin import AdminClient as AdminClient
    from .client.admin import ClusterAdmin as ClusterAdmin
    from .client.admin import LookupdHTTPClient as LookupdHTTPClient
    from .client.admin import LookupPoller as LookupPoller
    from .client.admin import NsqdHTTPClient as NsqdHTTPClient
    from .client.admin import PartitionResult as PartitionResult
    from .client.connection import Connection as Connection
    from .client.consumer import ConsumerStats as ConsumerStats
    from .client.greenlets import Greenlet as Greenlet
    from .client.handlers import Handler as Handler
    from .client.histogram import HistogramStats as HistogramStats
    from .client.http import Endpoint as Endpoint
    from .client.http import HttpClient as HttpClient
    from .client.http import parse_endpoint as parse_endpoint
    from .client.layers import DeflateLayer as DeflateLayer
    from .client.layers import Layer as Layer
    from .client.layers import SnappyLayer as SnappyLayer
    from .client.layers import client_context as client_context
    from .client.layers import server_hostname as server_hostname
    from .client.progress import ConsumerProgress as ConsumerProgress
    from .client.progress import ProducerProgress as ProducerProgress
    from .client.signals import LazySignal as LazySignal
    from .client.signals import MessageSignals as MessageSignals
    from .client.signals import SignalBook as SignalBook
    from .client.signals import receivers as receivers
    from .client.subscriptions import Subscriber as Subscriber
    from .client.trace import LOGGER_NAME as LOGGER_NAME
    from .client.trace import ConsumeRecord as ConsumeRecord
    from .client.trace import PublishRecord as PublishRecord
    from .client.trace import TraceLog as TraceLog
    from .client.trace import TraceRecord as TraceRecord
    from .client.trace import log_to_file as log_to_file
    from .client.trace import new_trace_id as new_trace_id
    from .columns import ColumnProducer as ColumnProducer
    from .columns import ColumnSubscription as ColumnSubscription
    from .columns import StoredRows as StoredRows
    from .columns import TopicLayout as TopicLayout
    from .consumer import Consumer as Consumer
    from .producer import Producer as Producer
    from .protocol.publishing import Receipt as Receipt

_MODULES = {
    "bridge": "Reply",
    "client.acknowledger": "NO_LIMIT Acknowledger",
    "client.admin": "AdminClient ClusterAdmin LookupdHTTPClient LookupPoller NsqdHTTPClient PartitionResult",
    "client.connection": "Connection",
    "client.consumer": "ConsumerStats",
    "client.greenlets": "Greenlet",
    "client.handlers": "Handler",
    "client.histogram": "HistogramStats",
    "client.http": "Endpoint HttpClient parse_endpoint",
    "client.layers": "DeflateLayer Layer SnappyLayer client_context server_hostname",
    "client.progress": "ConsumerProgress ProducerProgress",
    "client.signals": "LazySignal MessageSignals SignalBook receivers",
    "client.subscriptions": "Subscriber",
    "client.trace": "LOGGER_NAME ConsumeRecord PublishRecord TraceLog TraceRecord log_to_file new_trace_id",
    "columns": "ColumnProducer ColumnSubscription StoredRows TopicLayout",
    "consumer": "Consumer",
    "producer": "Producer",
    "protocol.publishing": "Receipt",
}
_HOME = {name: f".{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_HOME]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
