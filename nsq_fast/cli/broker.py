"""`nsq-fast broker`: run the embedded nsqd and nsqlookupd, together or apart, until Ctrl-C.

Every option of ``NsqdOptions`` is a flag with the original's name.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from nsq_fast.broker import LookupdServer, NsqdServer
from nsq_fast.broker.options import LookupdOptions, NsqdOptions

from . import options
from .interrupt import stop_signals

_DEFAULTS = {"tcp_address": "127.0.0.1:4150", "http_address": "127.0.0.1:4151"}
_LOOKUPD_DEFAULTS = {"tcp_address": "127.0.0.1:4160", "http_address": "127.0.0.1:4161"}
_LOOKUPD_FLAGS = ("tcp_address", "http_address", "inactive_producer_timeout", "tombstone_lifetime")


def _flags(config: type[Any], names: tuple[str, ...], prefix: str, defaults: dict[str, str]) -> Callable[..., Any]:
    """A decorator that adds one click option for each named field of a config."""
    fields = {field.name: field for field in dataclasses.fields(config)}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            function = _flag(fields[name], prefix, defaults.get(name, fields[name].default))(function)
        return function

    return decorate


def _flag(field: dataclasses.Field[Any], prefix: str, default: Any) -> Callable[..., Any]:
    several = isinstance(field.default, tuple)
    name = prefix + (field.name.removesuffix("es") if several else field.name).replace("_", "-")
    unit = field.metadata["unit"]
    common: dict[str, Any] = {"help": f"{field.metadata['doc'].capitalize()}.", "default": default}
    parameter = (prefix + field.name).replace("-", "_")
    if isinstance(field.default, bool):
        return click.option(f"--{name}/--no-{name}", parameter, **common)
    common["show_default"] = default not in ("", None, ())
    if several:
        return click.option(f"--{name}", parameter, multiple=True, metavar="HOST:PORT", **common)
    if field.metadata["choices"]:
        choices = click.Choice([choice for choice in field.metadata["choices"] if choice])
        return click.option(f"--{name}", parameter, type=choices, **{**common, "default": default or None})
    kind: Any = options.duration if unit == "s" else type(field.default) if field.default is not None else str
    return click.option(f"--{name}", parameter, type=kind, **common)


_NSQD_FLAGS = tuple(field.name for field in dataclasses.fields(NsqdOptions))


@click.command("broker", short_help="Run an embedded nsqd and nsqlookupd.")
@click.option("--nsqds", type=click.IntRange(0, 64), default=1, show_default=True, help="How many nsqds; 0: none.")
@click.option("--lookupd/--no-lookupd", default=True, help="Whether to run an nsqlookupd.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON.")
@_flags(LookupdOptions, _LOOKUPD_FLAGS, "lookupd-listen-", _LOOKUPD_DEFAULTS)
@_flags(NsqdOptions, _NSQD_FLAGS, "", _DEFAULTS)
def command(nsqds: int, lookupd: bool, as_json: bool, **flags: Any) -> None:
    """Run nsqd and nsqlookupd in this process until Ctrl-C or SIGTERM. The nsqds register with the nsqlookupd.

    With --nsqds above 1, all but the first listen on free ports. Port 0 is a free port. Without --data-path nothing
    outlives the process.
    """
    if not nsqds and not lookupd:
        raise click.UsageError("--nsqds 0 with --no-lookupd leaves nothing to run")
    prefix = "lookupd_listen_"
    lookupd_flags = {name.removeprefix(prefix): value for name, value in flags.items() if name.startswith(prefix)}
    nsqd_flags = {name: value for name, value in flags.items() if not name.startswith(prefix) and value is not None}
    with stop_signals() as stop, _running(nsqds, lookupd, nsqd_flags, lookupd_flags) as servers:
        click.echo(json.dumps(servers) if as_json else _shown(servers))
        stop.wait()


@contextmanager
def _running(
    nsqds: int, lookupd: bool, nsqd_flags: dict[str, Any], lookupd_flags: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Run the servers; give their addresses."""
    with ExitStack() as stack:
        described: dict[str, Any] = {"nsqds": [], "lookupd": None}
        if lookupd:
            server = LookupdServer(LookupdOptions(**lookupd_flags))
            _start(server, stack, "nsqlookupd")
            described["lookupd"] = {"tcp": str(server.tcp_address), "http": str(server.http_address)}
            seeds = (*nsqd_flags["lookupd_tcp_addresses"], str(server.tcp_address))
            nsqd_flags = {**nsqd_flags, "lookupd_tcp_addresses": seeds}
        for number in range(nsqds):
            nsqd = NsqdServer(NsqdOptions(**_numbered(nsqd_flags, number)))
            _start(nsqd, stack, "nsqd")
            https = nsqd.https_address
            described["nsqds"].append(
                {"tcp": str(nsqd.tcp_address), "http": str(nsqd.http_address), "https": str(https) if https else None}
            )
        yield described


def _start(server: NsqdServer | LookupdServer, stack: ExitStack, what: str) -> None:
    try:
        server.start()
    except OSError as error:
        listen = f"{server.options.tcp_address} and {server.options.http_address}"
        raise click.ClickException(f"{what} cannot listen on {listen}: {error.strerror or error}") from error
    stack.callback(server.stop)


def _numbered(flags: dict[str, Any], number: int) -> dict[str, Any]:
    """The options of one nsqd: those after the first have ports, a folder and a node id of their own."""
    if not number:
        return flags
    changed = dict(flags)
    for name in ("tcp_address", "http_address", "https_address"):
        if changed[name]:
            changed[name] = changed[name].rpartition(":")[0] + ":0"
    if changed.get("data_path"):
        changed["data_path"] = os.path.join(changed["data_path"], f"nsqd{number}")
        os.makedirs(changed["data_path"], exist_ok=True)
    changed["node_id"] = (changed["node_id"] + number) % 1024
    return changed


def _shown(servers: dict[str, Any]) -> str:
    lines = [
        f"nsqd        tcp {nsqd['tcp']}  http {nsqd['http']}" + (f"  https {nsqd['https']}" if nsqd["https"] else "")
        for nsqd in servers["nsqds"]
    ]
    if servers["lookupd"]:
        lines.append(f"nsqlookupd  tcp {servers['lookupd']['tcp']}  http {servers['lookupd']['http']}")
    return "\n".join([*lines, "Ctrl-C ends it."])
