"""nsq_fast: a fast, smart client for NSQ.

Public names are resolved when they are first used, so that importing the
package, or its compiled core, never imports gevent.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._lazy import lazy_names, search_path

try:
    from ._built import VERSION as __version__  # the build wrote it down (version.py)
except ImportError:
    __version__ = "0+unknown"  # sources that were not built do not know theirs

__path__ = search_path(__path__)

_HOME = {
    "install_as_gnsq": "gnsq",
    "Consumer": "consumer",
    "Producer": "producer",
    "ColumnProducer": "columns",
    "Receipt": "protocol.publishing",
    "ColumnSubscription": "columns",
    "NsqdHTTPClient": "client.admin",
    "LookupdHTTPClient": "client.admin",
    "ConfigDocument": "client.dynamic",
    "ConfigSource": "client.dynamic",
    "DynamicConfig": "client.dynamic",
    "FileConfigSource": "client.dynamic",
    "HttpConfigSource": "client.dynamic",
    "ClusterAdmin": "client.admin",
    "BackoffStrategy": "protocol.rdy",
    "ExponentialBackoff": "protocol.rdy",
    "Discard": "client.give_up",
    "LogMessage": "client.give_up",
    "PublishTo": "client.give_up",
    "WriteToFolder": "client.give_up",
    "TraceLog": "client.trace",
    "trace_log": "client.trace",
    "new_trace_id": "client.trace",
    "BackoffTimer": "gnsq",
    "Lookupd": "gnsq",
    "LookupdClient": "gnsq",
    "Nsqd": "gnsq",
    "NsqdTCPClient": "gnsq",
    "Reader": "gnsq",
    "Message": "_codec",
    "Address": "names",
    "NsqError": "errors",
    "RequeueMessage": "errors",
    "ServerError": "errors",
    "ConnectionConfig": "config",
    "ConsumerConfig": "config",
    "LookupConfig": "config",
    "ProducerConfig": "config",
}

_MODULES = {
    "config": "config",
    "errors": "errors",
    "names": "names",
    "backofftimer": "gnsq.backofftimer",
    "contrib": "gnsq.contrib",
    "decorators": "gnsq.decorators",
    "states": "gnsq.states",
    "stream": "gnsq.stream",
    "util": "gnsq.util",
}
"""What ``nsq_fast.name`` is when nothing has imported it yet: our modules, and gnsq's where ours has no such name."""

__all__ = ["__version__", *_HOME]


_name = lazy_names(__name__, _HOME)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f".{_MODULES[name]}", __name__) if name in _MODULES else _name(name)


def __dir__() -> list[str]:
    return sorted(__all__)
