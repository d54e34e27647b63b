"""The embedded servers as programs that answer like the originals: ``nsqd`` and ``nsqlookupd``.

They take the original's flags (``-flag=value``, ``--flag value``) and its configuration file, print its
version line, log to stderr which faces listen, and end on SIGTERM and SIGINT
with all saved. So what starts an nsqd and reads its log can start this one:

    printf '#!/bin/sh\nexec nsq-fast nsqd "$@"\n' > bin/nsqd
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec.toml

from nsq_fast import __version__
from nsq_fast.broker.options import SINGULAR, LookupdOptions, NsqdOptions
from nsq_fast.broker.servers import LookupdServer, NsqdServer, serve
from nsq_fast.config import Option
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import BROKER_LISTENING, BROKER_OPTION_IGNORED, BROKER_START_FAILED

LOG_FORMAT = "%(asctime)s %(levelname)s: %(message)s"
LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR", "fatal": "CRITICAL"}

# Flags of the originals that are no options of ours; whether each takes a value.
_EXTRA = {"config": True, "enable-experiment": True, "log-level": True, "log-prefix": True}
_DEPRECATED = {"verbose", "worker-id"}  # switches that have no effect in the originals either
_SINGULAR = {flag.replace("_", "-"): option for option, flag in SINGULAR.items()}
_CONFIG_NAMES = {"id": "node_id", "nsqlookupd_tcp_addresses": "lookupd_tcp_addresses"}
"""Options that a configuration file calls otherwise (nsqio/nsq: nsqd/options.go, the tags)."""

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


def main(kind: str, arguments: Sequence[str]) -> int:
    """Run ``nsqd`` or ``nsqlookupd`` until a signal stops it; returns the exit status."""
    if any(argument.lstrip("-") in ("version", "version=true") for argument in arguments):
        (sys.stdout or sys.stderr).write(version_line(kind) + "\n")
        return 0
    try:
        flags = parse_flags(kind, arguments)
        notes = flags.pop("notes")
        level, prefix = flags.pop("log_level"), flags.pop("log_prefix")
        server = _make(kind, flags)
    except ConfigError as error:
        sys.stderr.write(f"{kind}: {error}\n")
        return 2
    log = _logger(kind, level, prefix)
    for note in notes:
        log.warning("%s", note, extra=BROKER_OPTION_IGNORED)
    try:
        serve(server, lambda: _log_addresses(log, server))
    except OSError as error:
        log.critical("%s", error, extra=BROKER_START_FAILED)
        return 1
    return 0


def version_line(kind: str) -> str:
    """What ``nsqd --version`` prints."""
    # gnsq's tests, and other programs that read what nsqd prints, expect nothing but [a-z0-9.-] here; what is built
    # between two releases is 1.0.0.dev3+gabc.dirty.
    return f"{kind} v{NsqdOptions().version} (built w/nsq-fast-{__version__.lower().replace('+', '-')})"


def parse_flags(kind: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Read the original's command line, and the configuration file that it names, as options of ours.

    Besides those there are ``log_level`` (a name of ``logging``), ``log_prefix``, and ``notes``: what has no effect
    here, in words. What the command line says comes before what the file says. Raises ConfigError for what the original
    refuses.
    """
    known = _OPTIONS[kind].OPTIONS
    given: dict[str, Any] = {}
    notes: list[str] = []
    left = list(arguments)
    while left:
        name, value = _next_flag(left, known)
        option = _SINGULAR.get(name, name.replace("-", "_"))
        if name == "enable-experiment":
            notes.append(f"-enable-experiment={value} has no effect: there are no experiments here")
        elif option.endswith("_addresses"):
            given[option] = (*given.get(option, ()), value)
        elif option == "e2e_processing_latency_percentiles":
            given[option] = (*given.get(option, ()), *_floats(f"flag -{name}", value))
        elif name not in _DEPRECATED:
            given[option] = _value(known, option, f"flag -{name}", value)
    path = given.pop("config", "")
    options = _DEFAULTS[kind] | {"log_level": "INFO", "log_prefix": f"[{kind}] ", "notes": notes}
    options |= (_read_config(path, known, notes) if path else {}) | given
    if not options.get("tls_cert"):
        options.pop("https_address", None)
    return options


def _read_config(path: str, known: Mapping[str, Option], notes: list[str]) -> dict[str, Any]:
    """The options that a file of TOML sets; ``notes`` gets what it sets in vain.

    nsqio/nsq: apps/nsqd/main.go, Start; mreiferson/go-options: options.go, Resolve, which looks only for the names that
    it knows.
    """
    try:
        content: dict[str, Any] = msgspec.toml.decode(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"failed to load config file {path} - {error}") from error
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = _CONFIG_NAMES.get(key, key)
        is_known = (name in known and name not in _OUR_OWN) or name == "log_level"
        if not is_known or key in _CONFIG_NAMES.values():
            notes.append(f"{path}: {key} has no effect: there is no such option of the configuration file")
        else:
            options[name] = _config_value(known, name, f"{key} in {path}", value)
    return options


def _config_value(known: Mapping[str, Option], name: str, where: str, value: Any) -> Any:
    if name == "e2e_processing_latency_percentiles":
        listed = value if isinstance(value, list) else str(value).split(",")
        return tuple(_floats(where, ",".join(map(str, listed))))
    if name.endswith("_addresses"):
        return tuple(value) if isinstance(value, list) else tuple(str(value).split(","))
    if isinstance(value, bool):
        return str(value).lower()
    if name in known and known[name].unit == "s" and isinstance(value, int):
        return value / 1000  # a number is milliseconds
    return _value(known, name, where, str(value))


def _next_flag(left: list[str], known: Mapping[str, Option]) -> tuple[str, str]:
    argument = left.pop(0)
    if not argument.startswith("-"):
        raise ConfigError(f"unexpected argument {argument!r}")
    name, equals, value = argument.lstrip("-").partition("=")
    option = _SINGULAR.get(name, name.replace("-", "_"))
    is_option = option in known and option not in _OUR_OWN
    if not (is_option or name in _EXTRA or name in _DEPRECATED):
        raise ConfigError(f"flag provided but not defined: -{name}")
    if not equals:
        if name in _DEPRECATED or (is_option and isinstance(known[option].default, bool)):
            return name, "true"
        if not left:
            raise ConfigError(f"flag needs an argument: -{name}")
        value = left.pop(0)
    return name, value


def _floats(where: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f'invalid value "{text}" for {where}: not numbers with commas between them') from None


def _value(known: Mapping[str, Option], name: str, where: str, text: str) -> Any:
    if name == "log_level":
        if text.lower() not in LEVELS:
            raise ConfigError(f'invalid value "{text}" for {where}: must be one of {", ".join(LEVELS)}')
        return LEVELS[text.lower()]
    if name == "tls_required" and text.lower() in ("1", "t", "0", "f"):
        return "true" if text.lower() in ("1", "t") else "false"
    if name not in known or known[name].unit != "s":
        return text
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f'invalid value "{text}" for {where}: not a duration, such as 1m30s or 250ms')
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _make(kind: str, flags: dict[str, Any]) -> NsqdServer | LookupdServer:
    return NsqdServer(NsqdOptions(**flags)) if kind == "nsqd" else LookupdServer(LookupdOptions(**flags))


def _logger(kind: str, level: str, prefix: str) -> logging.Logger:
    logging.basicConfig(stream=sys.stderr, level=level, format=prefix.replace("%", "%%") + LOG_FORMAT)
    return logging.getLogger(f"nsq_fast.broker.{kind}")


def _log_addresses(log: logging.Logger, server: NsqdServer | LookupdServer) -> None:
    log.info("TCP: listening on %s", server.tcp_address, extra=BROKER_LISTENING)
    log.info("HTTP: listening on %s", server.http_address, extra=BROKER_LISTENING)
    if isinstance(server, NsqdServer) and server.https_address is not None:
        log.info("HTTPS: listening on %s", server.https_address, extra=BROKER_LISTENING)
