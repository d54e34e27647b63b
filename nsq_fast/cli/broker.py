"""`nsq-fast broker`: run the embedded nsqd and nsqlookupd, together or apart, or a redesigned cluster, until Ctrl-C;
`nsq-fast with-broker`: the same for as long as a program runs; `nsq-fast nsqd` and `nsq-fast nsqlookupd`: one of them
with the original's command line.

Every option of ``NsqdOptions`` is a flag with the original's name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource
from gevent import subprocess
from gevent.event import Event

from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.broker.executable import main
from nsq_fast.broker.net import listen_host
from nsq_fast.broker.options import SINGULAR, ClusterOptions, LookupdOptions, NsqdOptions, is_path
from nsq_fast.broker.servers import REGISTER_TIMEOUT, NsqdServer, ServerGroup
from nsq_fast.config import Config, Option
from nsq_fast.errors import ConfigError

from . import options
from .console import warnings_shown
from .options import on_signals, stop_signals

_DEFAULTS = {"tcp_address": "127.0.0.1:4150", "http_address": "127.0.0.1:4151"}
_LOOKUPD_DEFAULTS = {"tcp_address": "127.0.0.1:4160", "http_address": "127.0.0.1:4161"}
_FREE = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
_LOOKUPD_FLAGS = ("inactive_producer_timeout", "tombstone_lifetime")
_LISTEN = "lookupd_listen_"


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
    flag = f"--{prefix}{SINGULAR.get(declared.name, declared.name)}".replace("_", "-")
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


def _server_options(nsqd: dict[str, str], lookupd: dict[str, str]) -> Callable[..., Any]:
    """A decorator that adds the options of ``_group``; ``nsqd``, ``lookupd``: where they listen by default."""
    decorators = (
        options.number("--nsqds", default=1, least=0, most=64, help="How many nsqds to run; 0: none."),
        click.option("--lookupd/--no-lookupd", default=True, help="Whether to run an nsqlookupd."),
        click.option("--redesigned", is_flag=True, help="Run a cluster of the redesigned NSQ."),
        options.number("--nodes", default=3, most=64, help="How many nsqds the cluster has."),
        options.number("--lookupds", default=1, most=16, help="How many nsqlookupds the cluster has."),
        _flags(ClusterOptions, _CLUSTER_FLAGS, {}),
        _flags(LookupdOptions, ("tcp_address", "http_address"), lookupd, _LISTEN),
        _flags(LookupdOptions, _LOOKUPD_FLAGS, {}),
        _flags(NsqdOptions, _NSQD_FLAGS, nsqd),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


@click.command("broker", short_help="Run an embedded nsqd and nsqlookupd.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one line of JSON.")
@_server_options(_DEFAULTS, _LOOKUPD_DEFAULTS)
@click.pass_context
def command(context: click.Context, /, as_json: bool, **servers: Any) -> None:
    """Run nsqd and nsqlookupd in this process until Ctrl-C or SIGTERM. The nsqds register with the nsqlookupd.

    With --nsqds above 1, all but the first listen on free ports. Port 0 is a free port. Without --data-path nothing
    outlives the process.

    With --redesigned it is a cluster of --nodes nsqds and --lookupds nsqlookupds. Topics are created there before they
    are used: POST /topic/create of the first nsqlookupd.
    """
    with stop_signals() as stop, _running(_group(context, **servers)) as group:
        described = _describe(group)
        click.echo(json.dumps(described) if as_json else _shown(described, servers["redesigned"]))
        stop.wait()


def _topic(text: str) -> tuple[str, str]:
    topic, slash, channel = text.partition("/")
    return options.topic(topic), options.channel(channel) if slash else ""


@click.command(
    "with-broker",
    short_help="Run a program on an embedded broker of its own.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--topic", "topics", type=_topic, multiple=True, metavar="TOPIC[/CHANNEL]",
    help="Create a topic, and a channel of it, before the program starts (repeatable).",
)  # fmt: skip
@_server_options(_FREE, _FREE)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def with_broker_command(
    context: click.Context, /, program: tuple[str, ...], topics: Sequence[tuple[str, str]], **servers: Any
) -> None:
    """Run PROGRAM, with its arguments, on the servers of `nsq-fast broker`, which stop when it ends.

    The servers listen on free ports, or where the options say. A program whose source has a fixed address on this
    machine runs unchanged with that address: --tcp-address 127.0.0.1:4150. Other programs read the addresses,
    with commas between them, from NSQ_LOOKUPD_HTTP_ADDRESSES, NSQD_TCP_ADDRESSES and NSQD_HTTP_ADDRESSES, as the other
    commands do. Handlers under `nsq-fast run` use these servers and no others, whatever addresses they declare.

    The exit code is that of PROGRAM; 128 and more when a signal ended it, 127 when there is no such program. SIGTERM is
    passed on to PROGRAM; Ctrl-C reaches it directly.
    """
    with _running(_group(context, **servers)) as group:
        _make_topics(group, topics)
        status = _run(program, {**os.environ, **_environment(_describe(group))})
    context.exit(status)


def _make_topics(group: ServerGroup, topics: Iterable[tuple[str, str]]) -> None:
    """Make topics with their channels, on every nsqd; lookups know them."""
    channels: dict[str, list[str]] = {}
    for topic, channel in topics:
        channels.setdefault(topic, []).extend([channel] if channel else [])
    if isinstance(group, RedesignedCluster):
        for topic, names in channels.items():
            group.create_topic(topic, len(group.nsqds), channels=names)
    elif isinstance(group, Broker):
        for nsqd in group.nsqds:
            for topic, names in channels.items():
                made = nsqd.nsqd.get_topic(topic)
                for name in names:
                    made.get_channel(name)
        for nsqd in group.nsqds:
            nsqd.wait_registered(REGISTER_TIMEOUT)


def _environment(servers: Mapping[str, Any]) -> dict[str, str]:
    """What a program is told. One that `nsq-fast run` runs gets nsqds by lookup, soon after they have its topics."""
    tcp, http = (",".join(nsqd[face] for nsqd in servers["nsqds"]) for face in ("tcp", "http"))
    lookupds = ",".join(lookupd["http"] for lookupd in servers["lookupds"])
    return {
        "NSQD_TCP_ADDRESSES": tcp,
        "NSQD_HTTP_ADDRESSES": http,
        "NSQ_LOOKUPD_HTTP_ADDRESSES": lookupds,
        "NSQ_FAST_NSQD_TCP_ADDRESSES": "" if lookupds else tcp,
        "NSQ_FAST_LOOKUPD_HTTP_ADDRESSES": lookupds,
        "NSQ_FAST_LOOKUPD_POLL_INTERVAL": os.environ.get("NSQ_FAST_LOOKUPD_POLL_INTERVAL", "1"),
    }


def _run(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end; its exit code, as a shell has it."""
    is_there = Event()

    def pass_on(number: int) -> None:
        if number == signal.SIGTERM:  # of Ctrl-C a terminal tells both
            is_there.wait()
            process.terminate()

    with on_signals(pass_on):
        try:
            process = subprocess.Popen(program, env=environment)
        except OSError as error:
            click.echo(f"Error: cannot run {program[0]}: {error.strerror}", err=True)
            return 127 if isinstance(error, FileNotFoundError) else 126
        is_there.set()
        status: int = process.wait()
    return status if status >= 0 else 128 - status


def _group(
    context: click.Context, nsqds: int, lookupd: bool, redesigned: bool, nodes: int, lookupds: int, **flags: Any
) -> ServerGroup:
    """The servers that the options of a command ask for. Raises UsageError."""
    _refuse_mixture(context, redesigned)
    if not nsqds and not lookupd:
        raise click.UsageError("--nsqds 0 with --no-lookupd leaves nothing to run")
    lookupd_flags = {name.removeprefix(_LISTEN): flags.pop(name) for name in list(flags) if name.startswith(_LISTEN)}
    lookupd_flags |= {name: flags.pop(name) for name in _LOOKUPD_FLAGS}
    try:
        LookupdOptions.of(lookupd_flags)
    except ConfigError as error:  # of an nsqd there is an option of the same name
        raise click.UsageError(f"of the nsqlookupd: {error}") from error
    if redesigned:
        given = {name: value for name, value in flags.items() if name in _DEFAULTS or _is_given(context, name)}
        return _cluster(nodes, lookupds, given, lookupd_flags)
    return _broker(nsqds, lookupd, {name: flags[name] for name in _NSQD_FLAGS}, lookupd_flags)


def _refuse_mixture(context: click.Context, redesigned: bool) -> None:
    """Raise UsageError for a flag that has no meaning for what shall run."""
    others = ("nsqds", "lookupd", *_NOT_REDESIGNED) if redesigned else ("nodes", "lookupds", *_CLUSTER_FLAGS)
    for name in others:
        if _is_given(context, name):
            rest = "not for --redesigned" if redesigned else "for --redesigned only"
            raise click.UsageError(f"--{SINGULAR.get(name, name).replace('_', '-')}: {rest}")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _cluster(nodes: int, lookupds: int, flags: dict[str, Any], lookupd_flags: dict[str, Any]) -> RedesignedCluster:
    addresses = {
        "nsqds": _all_but_first_free(nodes, flags),
        "lookupds": _all_but_first_free(lookupds, lookupd_flags),
    }
    try:
        return RedesignedCluster(nodes, lookupds, lookupd_options=lookupd_flags, addresses=addresses, **flags)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _all_but_first_free(count: int, flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where servers listen: all but the first on free ports, or on paths that are counted."""
    faces = {face: flags[f"{face}_address"] for face in ("tcp", "http")}
    free = {face: (listen_host(at), 0) for face, at in faces.items() if at and not is_path(at)}
    return [{}] + [free] * (count - 1)


def _broker(nsqds: int, lookupd: bool, nsqd_flags: dict[str, Any], lookupd_flags: dict[str, Any]) -> Broker:
    addresses = {"nsqds": _all_but_first_free(nsqds, nsqd_flags)} if nsqds else None
    return Broker(nsqds, lookupd, lookupd_options=lookupd_flags, addresses=addresses, **nsqd_flags)


@contextmanager
def _running(group: ServerGroup) -> Iterator[ServerGroup]:
    with warnings_shown():  # what a damaged file, or a full disk, cost
        try:
            group.start()
        except OSError as error:
            raise click.ClickException(f"cannot start: {error}") from error
        try:
            yield group
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


_FLAGS_OF = {
    "nsqd": "`nsq-fast broker --help` describes the flags, except -config, -log-level and -log-prefix.",
    "nsqlookupd": "The flags: -tcp-address, -http-address, -broadcast-address, -inactive-producer-timeout,"
    " -tombstone-lifetime, -config, -log-level and -log-prefix.",
}


def _as_the_original(name: str) -> click.Command:
    """The command of one server, with the flags that the original has."""

    @click.command(
        name,
        short_help=f"The embedded {name}, with the original's flags and log.",
        help=(
            f"Run the embedded {name} with the command line of the original: the same flags (-flag=value), --config"
            f" FILE, --version, and the same log lines.\n\n{_FLAGS_OF[name]}"
        ),
        context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    )
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def run(flags: tuple[str, ...]) -> None:
        sys.exit(main(name, flags))

    return run


nsqd_command: click.Command = _as_the_original("nsqd")
nsqlookupd_command: click.Command = _as_the_original("nsqlookupd")
