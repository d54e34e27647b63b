"""nsqd's /config route: options under the original's names, in its units (nsqio/nsq: nsqd/http.go, doConfig)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from nsq_fast.broker.http.router import Request
from nsq_fast.config import Option
from nsq_fast.errors import ConfigError

from .host import Host

LOG_LEVELS = {"debug": 1, "info": 2, "warn": 3, "error": 4, "fatal": 5}

_PYTHON_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
# The numbers of nsqio/nsq: nsqd/options.go, and of Go's crypto/tls.
_NUMBERS = {
    "tls_required": {"false": 0, "tcp-https": 1, "true": 2},
    "tls_min_version": {"tls1.0": 0x0301, "tls1.1": 0x0302, "tls1.2": 0x0303, "tls1.3": 0x0304},
}
_RENAMED = {"node_id": "id", "lookupd_tcp_addresses": "nsqlookupd_tcp_addresses"}
# Options of ours that are no flags of the original.
_HIDDEN = {
    "version",
    "preserve_order",
    "queue_scan_interval",
    "queue_scan_refresh_interval",
    "queue_scan_dirty_percent",
    "client_timeout",
}
# Flags of the original that mean nothing here, at their defaults.
_CONSTANT = {
    "log_prefix": "[nsqd] ",
    "enable_experiment": [],
}


class Settings:
    """The options of an nsqd as /config has them.

    Args:
        set_lookupds: called with the new nsqlookupd addresses when they are changed.
    """

    def __init__(self, nsqd: Host, set_lookupds: Callable[[list[str]], None]) -> None:
        self._nsqd = nsqd
        self._set_lookupds = set_lookupds
        self._log_level = "info"

    def get(self, request: Request) -> Any:
        """The value of the option that the request names."""
        values = self._values()
        if request.argument not in values:
            raise request.refuse(400, "INVALID_OPTION")
        return values[request.argument]

    def put(self, request: Request, body: bytes) -> None:
        """Change the option that the request names; two can be changed."""
        if not body:
            raise request.refuse(413, "INVALID_VALUE")
        if request.argument == "nsqlookupd_tcp_addresses":
            self._put_lookupds(request, body)
        elif request.argument == "log_level":
            self._put_log_level(request, body)
        else:
            raise request.refuse(400, "INVALID_OPTION")

    def _put_lookupds(self, request: Request, body: bytes) -> None:
        try:
            addresses = msgspec.json.decode(body, type=list[str] | None) or []
            self._nsqd.set_options(lookupd_tcp_addresses=tuple(addresses))
        except (msgspec.MsgspecError, ConfigError):
            raise request.refuse(400, "INVALID_VALUE") from None
        self._set_lookupds(addresses)

    def _put_log_level(self, request: Request, body: bytes) -> None:
        level = body.decode("utf-8", "replace").lower()
        if level not in LOG_LEVELS:
            raise request.refuse(400, "INVALID_VALUE")
        self._log_level = level
        logging.getLogger("nsq_fast.broker").setLevel(_PYTHON_LEVELS[level])

    def _values(self) -> dict[str, Any]:
        values = {**_CONSTANT, "log_level": LOG_LEVELS[self._log_level]}
        for option in self._nsqd.options.OPTIONS.values():
            if option.name not in _HIDDEN:
                values[_RENAMED.get(option.name, option.name)] = self._shown(option)
        return values

    def _shown(self, option: Option) -> Any:
        value = getattr(self._nsqd.options, option.name)
        if option.name in _NUMBERS:
            return _NUMBERS[option.name][value]
        if option.unit == "s":
            return round(value * 1e9)  # Go shows a duration in nanoseconds
        return "" if value is None else value
