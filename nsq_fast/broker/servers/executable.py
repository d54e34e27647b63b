"""The embedded servers as programs that answer like the originals: ``nsqd`` and ``nsqlookupd``.

They take the original's flags (``-flag=value``, ``--flag value``), print its
version line, log to stderr which faces listen, and end on SIGTERM and SIGINT
with all saved. So what starts an nsqd and reads its log can start this one:

    printf '#!/bin/sh\nexec nsq-fast nsqd "$@"\n' > bin/nsqd
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nsq_fast._version import __version__
from nsq_fast.broker.options import LookupdOptions, NsqdOptions
from nsq_fast.config import Option
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import BROKER_LISTENING, BROKER_START_FAILED

from .group import ServerGroup, serve
from .lookupd import LookupdServer
from .nsqd import NsqdServer

LOG_FORMAT = "[{kind}] %(asctime)s %(levelname)s: %(message)s"
LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR", "fatal": "CRITICAL"}

# Flags of the originals without a meaning here; whether each takes a value.
_IGNORED = {
    "config": True, "enable-experiment": True, "log-prefix": True, "verbose": False, "worker-id": True,
}  # fmt: skip
_SINGULAR = {
    "lookupd-tcp-address": "lookupd_tcp_addresses",
    "auth-http-address": "auth_http_addresses",
    "e2e-processing-latency-percentile": "e2e_processing_latency_percentiles",
}
_OUR_OWN = {"version"}  # an option of ours that the original has as an order
_DURATION = re.compile(r"([0-9.]+)(h|ms|us|µs|ns|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_DEFAULTS = {
    "nsqd": {
        "tcp_address": "0.0.0.0:4150",
        "http_address": "0.0.0.0:4151",
        "https_address": "0.0.0.0:4152",
        "data_path": ".",
    },
    "nsqlookupd": {"tcp_address": "0.0.0.0:4160", "http_address": "0.0.0.0:4161"},
}
_OPTIONS: dict[str, type[NsqdOptions] | type[LookupdOptions]] = {"nsqd": NsqdOptions, "nsqlookupd": LookupdOptions}


class _One(ServerGroup):
    """A single server as a group, so that it is served as all groups are."""

    def __init__(self, server: NsqdServer | LookupdServer) -> None:
        super().__init__()
        self._server = server

    @property
    def servers(self) -> Mapping[str, NsqdServer | LookupdServer]:
        return {"server": self._server}

    def _start(self) -> None:
        self._server.start()


def main(kind: str, arguments: Sequence[str]) -> int:
    """Run ``nsqd`` or ``nsqlookupd`` until a signal stops it; returns the exit status."""
    if any(argument.lstrip("-") in ("version", "version=true") for argument in arguments):
        sys.stdout.write(version_line(kind) + "\n")
        return 0
    try:
        flags = parse_flags(kind, arguments)
        level = LEVELS[str(flags.pop("log_level", "info")).lower()]
        server = _make(kind, flags)
    except (ConfigError, KeyError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    log = _logger(kind, level)
    try:
        serve(_One(server), lambda: _log_addresses(log, server))
    except OSError as error:
        log.critical("%s", error, extra=BROKER_START_FAILED)
        return 1
    return 0


def version_line(kind: str) -> str:
    """What ``nsqd --version`` prints."""
    return f"{kind} v{NsqdOptions().version} (built w/nsq-fast-{__version__})"


def parse_flags(kind: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Read the original's command line as options of ours. Raises ConfigError for what the original refuses."""
    known = _OPTIONS[kind].OPTIONS
    options: dict[str, Any] = dict(_DEFAULTS[kind])
    left = list(arguments)
    while left:
        name, value = _next_flag(left, known)
        if name in _IGNORED:
            continue
        option = _SINGULAR.get(name, name.replace("-", "_"))
        if option == "log_level":
            options[option] = value
        elif option.endswith("_addresses") and option in known:
            options[option] = (*options.get(option, ()), value)
        elif option == "e2e_processing_latency_percentiles":
            options[option] = (*options.get(option, ()), *_floats(name, value))
        else:
            options[option] = _value(known[option], value)
    if not options.get("tls_cert"):
        options.pop("https_address", None)
    return options


def _next_flag(left: list[str], known: Mapping[str, Option]) -> tuple[str, str]:
    """Take one flag and its value."""
    argument = left.pop(0)
    if not argument.startswith("-"):
        raise ConfigError(f"unexpected argument {argument!r}")
    name, equals, value = argument.lstrip("-").partition("=")
    option = _SINGULAR.get(name, name.replace("-", "_"))
    if name not in _IGNORED and (option not in known or option in _OUR_OWN) and option != "log_level":
        raise ConfigError(f"flag provided but not defined: -{name}")
    if not equals:
        is_switch = not _IGNORED.get(name, True) or (option in known and isinstance(known[option].default, bool))
        if is_switch:
            return name, "true"
        if not left:
            raise ConfigError(f"flag needs an argument: -{name}")
        value = left.pop(0)
    return name, value


def _floats(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f'invalid value "{text}" for flag -{name}: not numbers with commas between them') from None


def _value(option: Option, text: str) -> Any:
    if option.unit != "s":
        return text
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f'invalid value "{text}" for flag -{option.name.replace("_", "-")}: not a duration')
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _make(kind: str, flags: dict[str, Any]) -> NsqdServer | LookupdServer:
    return NsqdServer(NsqdOptions(**flags)) if kind == "nsqd" else LookupdServer(LookupdOptions(**flags))


def _logger(kind: str, level: str) -> logging.Logger:
    logging.basicConfig(stream=sys.stderr, level=level, format=LOG_FORMAT.format(kind=kind))
    return logging.getLogger(f"nsq_fast.broker.{kind}")


def _log_addresses(log: logging.Logger, server: NsqdServer | LookupdServer) -> None:
    log.info("TCP: listening on %s", server.tcp_address, extra=BROKER_LISTENING)
    log.info("HTTP: listening on %s", server.http_address, extra=BROKER_LISTENING)
    if isinstance(server, NsqdServer) and server.https_address is not None:
        log.info("HTTPS: listening on %s", server.https_address, extra=BROKER_LISTENING)
