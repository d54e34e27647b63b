"""`nsq-fast broker`: run the embedded nsqd and nsqlookupd, together or apart, or a redesigned cluster, until Ctrl-C;
`nsq-fast nsqd` and `nsq-fast nsqlookupd`: one of them with the original's command line.

Every option of ``NsqdOptions`` is a flag with the original's name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.broker.executable import main
from nsq_fast.broker.options import ClusterOptions, LookupdOptions, NsqdOptions
from nsq_fast.broker.servers import NsqdServer, ServerGroup
from nsq_fast.config import Config, Option
from nsq_fast.errors import ConfigError

from . import options
from .options import stop_signals

_DEFAULTS = {"tcp_address": "127.0.0.1:4150", "http_address": "127.0.0.1:4151"}
_LOOKUPD_DEFAULTS = {"tcp_address": "127.0.0.1:4160", "http_address": "127.0.0.1:4161"}
_LOOKUPD_FLAGS = ("inactive_producer_timeout", "tombstone_lifetime")
_LISTEN = "lookupd_listen_"
# What is called in the plural as an option, and given one by one as a flag.
_SINGULAR = {
    "lookupd_tcp_addresses": "lookupd_tcp_address",
    "auth_http_addresses": "auth_http_address",
    "e2e_processing_latency_percentiles": "e2e_processing_latency_percentile",
}


class _Switch(click.Option):
    """A flag whose help leaves out the other one, by which it is taken back: both on a line are too wide."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0].partition(" / ")[0], record[1])


def _flags(
    config: type[Config], names: tuple[str, ...], defaults: dict[str, str], prefix: str = ""
) -> Callable[..., Any]:
    """A decorator that adds one click option for each named option of a config."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            function = _flag(config.OPTIONS[name], prefix, defaults.get(name, config.OPTIONS[name].default))(function)
        return function

    return decorate


def _flag(declared: Option, prefix: str, default: Any) -> Callable[..., Any]:
    several = isinstance(declared.default, tuple)
    flag = f"--{prefix}{_SINGULAR.get(declared.name, declared.name)}".replace("_", "-")
    doc = declared.doc
    common: dict[str, Any] = {"help": f"{doc[0].upper()}{doc[1:]}.", "default": default}
    if isinstance(declared.default, bool):
        return click.option(f"{flag}/{flag.replace('--', '--no-', 1)}", prefix + declared.name, cls=_Switch, **common)
    if several:
        is_number = declared.name == "e2e_processing_latency_percentiles"
        kind: dict[str, Any] = {"type": float, "metavar": "FRACTION"} if is_number else {"metavar": "HOST:PORT"}
        return click.option(flag, prefix + declared.name, multiple=True, **kind, **common)
    common["show_default"] = default not in ("", None)
    return click.option(flag, prefix + declared.name, **_kind(declared), **common)


def _kind(declared: Option) -> dict[str, Any]:
    if declared.unit == "s":
        return {"type": options.duration, "metavar": "DURATION"}
    return {"type": declared.kind}


_NSQD_FLAGS = tuple(NsqdOptions.OPTIONS)
_CLUSTER_FLAGS = tuple(ClusterOptions.OPTIONS)
# Without effect in a cluster, which has no memory queue, no nsqlookupd but its own, and pushes nothing to statsd.
_NOT_REDESIGNED = (
    *("lookupd_tcp_addresses", "mem_queue_size", "preserve_order"),
    *(name for name in _NSQD_FLAGS if name.startswith(("statsd_", "e2e_"))),
)


@click.command("broker", short_help="Run an embedded nsqd and nsqlookupd.")
@options.number("--nsqds", default=1, least=0, most=64, help="How many nsqds; 0: none.")
@click.option("--lookupd/--no-lookupd", default=True, help="Whether to run an nsqlookupd.")
@click.option("--redesigned", is_flag=True, help="Run a cluster of the redesigned NSQ.")
@options.number("--nodes", default=3, most=64, help="nsqds of the cluster.")
@options.number("--lookupds", default=1, most=16, help="nsqlookupds of the cluster.")
@_flags(ClusterOptions, _CLUSTER_FLAGS, {})
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON.")
@_flags(LookupdOptions, ("tcp_address", "http_address"), _LOOKUPD_DEFAULTS, _LISTEN)
@_flags(LookupdOptions, _LOOKUPD_FLAGS, {})
@_flags(NsqdOptions, _NSQD_FLAGS, _DEFAULTS)
@click.pass_context
def command(
    context: click.Context,
    /,
    nsqds: int,
    lookupd: bool,
    redesigned: bool,
    nodes: int,
    lookupds: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run nsqd and nsqlookupd in this process until Ctrl-C or SIGTERM. The nsqds register with the nsqlookupd.

    With --nsqds above 1, all but the first listen on free ports. Port 0 is a free port. Without --data-path nothing
    outlives the process.

    With --redesigned it is a cluster of --nodes nsqds and --lookupds nsqlookupds. Topics are created there before they
    are used: POST /topic/create of the first nsqlookupd.
    """
    _refuse_mixture(context, redesigned)
    if not nsqds and not lookupd:
        raise click.UsageError("--nsqds 0 with --no-lookupd leaves nothing to run")
    lookupd_flags = {name.removeprefix(_LISTEN): flags.pop(name) for name in list(flags) if name.startswith(_LISTEN)}
    lookupd_flags |= {name: flags.pop(name) for name in _LOOKUPD_FLAGS}
    if redesigned:
        given = {name: value for name, value in flags.items() if name in _DEFAULTS or _is_given(context, name)}
        group: ServerGroup = _cluster(nodes, lookupds, given, lookupd_flags)
    else:
        group = _broker(nsqds, lookupd, {name: flags[name] for name in _NSQD_FLAGS}, lookupd_flags)
    with stop_signals() as stop, _running(group):
        servers = _describe(group)
        click.echo(json.dumps(servers) if as_json else _shown(servers, redesigned))
        stop.wait()


def _refuse_mixture(context: click.Context, redesigned: bool) -> None:
    """Raise UsageError for a flag that has no meaning for what shall run."""
    others = ("nsqds", "lookupd", *_NOT_REDESIGNED) if redesigned else ("nodes", "lookupds", *_CLUSTER_FLAGS)
    for name in others:
        if _is_given(context, name):
            rest = "not for --redesigned" if redesigned else "for --redesigned only"
            raise click.UsageError(f"--{_SINGULAR.get(name, name).replace('_', '-')}: {rest}")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _cluster(nodes: int, lookupds: int, flags: dict[str, Any], lookupd_flags: dict[str, Any]) -> RedesignedCluster:
    addresses = {
        "nsqds": _all_but_first_free(nodes, flags["tcp_address"]),
        "lookupds": _all_but_first_free(lookupds, lookupd_flags["tcp_address"]),
    }
    try:
        return RedesignedCluster(nodes, lookupds, lookupd_options=lookupd_flags, addresses=addresses, **flags)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _all_but_first_free(count: int, address: str) -> list[dict[str, Any]]:
    host = address.rpartition(":")[0]
    return [{}] + [{"tcp": (host, 0), "http": (host, 0)}] * (count - 1)


def _broker(nsqds: int, lookupd: bool, nsqd_flags: dict[str, Any], lookupd_flags: dict[str, Any]) -> Broker:
    addresses = {"nsqds": _all_but_first_free(nsqds, nsqd_flags["tcp_address"])} if nsqds else None
    return Broker(nsqds, lookupd, lookupd_options=lookupd_flags, addresses=addresses, **nsqd_flags)


@contextmanager
def _running(group: ServerGroup) -> Iterator[None]:
    try:
        group.start()
    except OSError as error:
        raise click.ClickException(f"cannot start: {error}") from error
    try:
        yield
    finally:
        group.stop()


def _describe(group: ServerGroup) -> dict[str, Any]:
    nsqds, lookupds = [], []
    for server in group.servers.values():
        faces = {"tcp": str(server.tcp_address), "http": str(server.http_address)}
        if isinstance(server, NsqdServer):
            nsqds.append({**faces, "https": str(server.https_address or "") or None})
        else:
            lookupds.append(faces)
    return {"nsqds": nsqds, "lookupd": lookupds[0] if lookupds else None, "lookupds": lookupds}


def _shown(servers: dict[str, Any], redesigned: bool) -> str:
    lines = [
        f"nsqd        tcp {nsqd['tcp']}  http {nsqd['http']}" + (f"  https {nsqd['https']}" if nsqd["https"] else "")
        for nsqd in servers["nsqds"]
    ]
    lines += [f"nsqlookupd  tcp {each['tcp']}  http {each['http']}" for each in servers["lookupds"]]
    if redesigned:
        replicas = min(2, len(servers["nsqds"]))  # a topic that wants more than there are nodes is refused
        example = f"http://{servers['lookupd']['http']}/topic/create?topic=orders&partition_num=3&replicator={replicas}"
        lines.append(f"a topic:    curl -X POST '{example}&orderedmulti=true'")
    return "\n".join([*lines, "Ctrl-C ends it."])


def _as_the_original(name: str) -> click.Command:
    """The command of one server, with the flags that the original has."""

    @click.command(
        name,
        short_help=f"The embedded {name}, with the original's flags and log.",
        help=f"Run {name} as the original is run: its flags (-flag=value), --config FILE, --version, its log lines.",
        context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    )
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def run(flags: tuple[str, ...]) -> None:
        sys.exit(main(name, flags))

    return run


nsqd_command = _as_the_original("nsqd")
nsqlookupd_command = _as_the_original("nsqlookupd")
