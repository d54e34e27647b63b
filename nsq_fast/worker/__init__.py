"""The worker: `nsq-fast run app:consumers` runs the consumers that a module declares, in processes that it looks after.

    from nsq_fast.worker import subscribe

    @subscribe("orders", "billing", concurrency=8)
    def bill(consumer, message):
        ...

A supervisor starts processes, each a fresh interpreter that imports the module and runs all its consumers. It never
imports the module itself, and runs no hub. What a process has to say arrives as reports over a socket, which ends with
either side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast._lazy import lazy_names

if TYPE_CHECKING:
    from .settings import Subscription as Subscription
    from .settings import subscribe as subscribe

_HOME = {"Subscription": "settings", "subscribe": "settings"}

__all__ = [*_HOME]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
