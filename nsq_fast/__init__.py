"""nsq_fast: a fast, smart client for NSQ.

Public names are resolved when they are first used, so that importing the
package, or its compiled core, never imports gevent.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__

_HOME = {
    "Consumer": "runtime.consumer",
    "Producer": "runtime.producer",
    "Receipt": "runtime.addressed",
    "NsqdHTTPClient": "runtime.admin",
    "LookupdHTTPClient": "runtime.admin",
    "TraceLog": "runtime.trace",
    "trace_log": "runtime.trace",
    "new_trace_id": "runtime.trace",
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

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
