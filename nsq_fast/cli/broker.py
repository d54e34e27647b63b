"""`nsq-fast broker`: run the embedded nsqd and nsqlookupd, together or apart, until Ctrl-C.

Every option of ``NsqdOptions`` is a flag with the original's name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from nsq_fast.broker import Broker
from nsq_fast.broker.options import LookupdOptions, NsqdOptions

from . import options
from .interrupt import stop_signals

_DEFAULTS = {"tcp_address": "127.0.0.1:4150", "http_address": "127.0.0.1:4151"}
_LOOKUPD_DEFAULTS = {"tcp_address": "127.0.0.1:4160", "http_address": "127.0.0.1:4161"}
_LOOKUPD_FLAGS = ("inactive_producer_timeout", "tombstone_lifetime")
_LISTEN = "lookupd_listen_"


def _flags(config: type[Any], names: tuple[str, ...], defaults: dict[str, str], prefix: str = "") -> Callable[..., Any]:
    """A decorator that adds one click option for each named field of a config."""
    fields = {field.name: field for field in dataclasses.fields(config)}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            function = _flag(fields[name], prefix, defaults.get(name, fields[name].default))(function)
        return function

    return decorate


def _flag(field: dataclasses.Field[Any], prefix: str, default: Any) -> Callable[..., Any]:
    several = isinstance(field.default, tuple)
    flag = f"--{prefix}{field.name.removesuffix('es') if several else field.name}".replace("_", "-")
    doc = field.metadata["doc"]
    common: dict[str, Any] = {"help": f"{doc[0].upper()}{doc[1:]}.", "default": default}
    if isinstance(field.default, bool):
        return click.option(f"{flag}/{flag.replace('--', '--no-', 1)}", prefix + field.name, **common)
    if several:
        return click.option(flag, prefix + field.name, multiple=True, metavar="HOST:PORT", **common)
    common["show_default"] = default not in ("", None)
    return click.option(flag, prefix + field.name, **_kind(field), **common)


def _kind(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.metadata["unit"] == "s":
        return {"type": options.duration, "metavar": "DURATION"}
    return {"type": field.metadata["kind"]}


_NSQD_FLAGS = tuple(field.name for field in dataclasses.fields(NsqdOptions))


@click.command("broker", short_help="Run an embedded nsqd and nsqlookupd.")
@click.option("--nsqds", type=click.IntRange(0, 64), default=1, show_default=True, help="How many nsqds; 0: none.")
@click.option("--lookupd/--no-lookupd", default=True, help="Whether to run an nsqlookupd.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON.")
@_flags(LookupdOptions, ("tcp_address", "http_address"), _LOOKUPD_DEFAULTS, _LISTEN)
@_flags(LookupdOptions, _LOOKUPD_FLAGS, {})
@_flags(NsqdOptions, _NSQD_FLAGS, _DEFAULTS)
def command(nsqds: int, lookupd: bool, as_json: bool, **flags: Any) -> None:
    """Run nsqd and nsqlookupd in this process until Ctrl-C or SIGTERM. The nsqds register with the nsqlookupd.

    With --nsqds above 1, all but the first listen on free ports. Port 0 is a free port. Without --data-path nothing
    outlives the process.
    """
    if not nsqds and not lookupd:
        raise click.UsageError("--nsqds 0 with --no-lookupd leaves nothing to run")
    lookupd_flags = {name.removeprefix(_LISTEN): flags.pop(name) for name in list(flags) if name.startswith(_LISTEN)}
    lookupd_flags |= {name: flags.pop(name) for name in _LOOKUPD_FLAGS}
    broker = _broker(nsqds, lookupd, flags, lookupd_flags)
    with stop_signals() as stop, _running(broker):
        servers = _describe(broker)
        click.echo(json.dumps(servers) if as_json else _shown(servers))
        stop.wait()


def _broker(nsqds: int, lookupd: bool, nsqd_flags: dict[str, Any], lookupd_flags: dict[str, Any]) -> Broker:
    host = nsqd_flags["tcp_address"].rpartition(":")[0]
    free = {"tcp": (host, 0), "http": (host, 0)}
    addresses: dict[str, Any] = {"nsqds": [{}] + [free] * (nsqds - 1)}
    return Broker(nsqds, lookupd, lookupd_options=lookupd_flags, addresses=addresses, **nsqd_flags)


@contextmanager
def _running(broker: Broker) -> Iterator[None]:
    try:
        broker.start()
    except OSError as error:
        raise click.ClickException(f"cannot start: {error}") from error
    try:
        yield
    finally:
        broker.stop()


def _describe(broker: Broker) -> dict[str, Any]:
    nsqds = [
        {"tcp": str(nsqd.tcp_address), "http": str(nsqd.http_address), "https": str(nsqd.https_address or "") or None}
        for nsqd in broker.nsqds
    ]
    lookupd = broker.lookupd
    described = lookupd and {"tcp": str(lookupd.tcp_address), "http": str(lookupd.http_address)}
    return {"nsqds": nsqds, "lookupd": described}


def _shown(servers: dict[str, Any]) -> str:
    lines = [
        f"nsqd        tcp {nsqd['tcp']}  http {nsqd['http']}" + (f"  https {nsqd['https']}" if nsqd["https"] else "")
        for nsqd in servers["nsqds"]
    ]
    if servers["lookupd"]:
        lines.append(f"nsqlookupd  tcp {servers['lookupd']['tcp']}  http {servers['lookupd']['http']}")
    return "\n".join([*lines, "Ctrl-C ends it."])
