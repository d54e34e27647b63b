"""`nsq-fast broker`: run the embedded nsqd and nsqlookupd, together or apart, or a redesigned cluster, until Ctrl-C;
`nsq-fast with-broker`: the same for as long as a program runs.

Every option of ``NsqdOptions`` is a flag with the original's name.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource
from gevent import subprocess
from gevent.event import Event

from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.broker.options import SINGULAR, ClusterOptions, LookupdOptions, NsqdOptions, is_path, listen_host
from nsq_fast.broker.process import ServerAddresses, addresses_of
from nsq_fast.broker.servers import REGISTER_TIMEOUT, ServerGroup
from nsq_fast.config import Config, Option
from nsq_fast.errors import ConfigError

from . import options
from .options import argument, flag, number, option, several, warnings_shown
from .servers import on_signals, stop_signals

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


_NSQD_FLAGS = tuple(NsqdOptions.OPTIONS)
_CLUSTER_FLAGS = tuple(ClusterOptions.OPTIONS)
# Without effect in a cluster, which has no memory queue, no nsqlookupd but its own, and pushes nothing to statsd.
_NOT_REDESIGNED = (
    *("lookupd_tcp_addresses", "mem_queue_size", "preserve_order"),
    *(name for name in _NSQD_FLAGS if name.startswith(("statsd_", "e2e_"))),
)


def _flag_name(name: str) -> str:
    return options.flag_of(SINGULAR.get(name, name))


def _flag(declared: Option, prefix: str, default: Any) -> Any:
    given: dict[str, Any] = {"default": default, "show_default": default not in ("", None)}
    if declared.kind is bool:
        given |= {"cls": _Switch, "show_default": False}
    elif declared.kind is tuple:
        is_number = declared.name == "e2e_processing_latency_percentiles"
        kind = {"type": float, "metavar": "FRACTION"} if is_number else {"metavar": "HOST:PORT"}
        given |= {"multiple": True, "show_default": False, **kind}
    else:
        given["type"] = options.duration if declared.unit == "s" else declared.kind
    return options.of_config(declared, _flag_name(prefix + SINGULAR.get(declared.name, declared.name)), **given)


def _server_options(nsqd: dict[str, str], lookupd: dict[str, str]) -> dict[str, Any]:
    """The parameters of ``_group``; ``nsqd``, ``lookupd``: where they listen by default."""

    def flags(config: type[Config], names: Iterable[str], defaults: dict[str, str], prefix: str = "") -> dict[str, Any]:
        declared = {name: config.OPTIONS[name] for name in names}
        return {prefix + key: _flag(each, prefix, defaults.get(key, each.default)) for key, each in declared.items()}

    return {
        "nsqds": number(default=1, least=0, most=64, help="How many nsqds to run; 0: none."),
        "lookupd": option("--lookupd/--no-lookupd", default=True, help="Whether to run an nsqlookupd."),
        "redesigned": flag(help="Run a cluster of the redesigned NSQ."),
        "nodes": number(default=3, most=64, help="How many nsqds the cluster has."),
        "lookupds": number(default=1, most=16, help="How many nsqlookupds the cluster has."),
        **flags(ClusterOptions, _CLUSTER_FLAGS, {}),
        **flags(LookupdOptions, lookupd, lookupd, _LISTEN),
        **flags(LookupdOptions, _LOOKUPD_FLAGS, {}),
        **flags(NsqdOptions, _NSQD_FLAGS, nsqd),
    }


@options.command("broker", "Run an embedded nsqd and nsqlookupd.", more=_server_options(_DEFAULTS, _LOOKUPD_DEFAULTS))
def command(as_json: bool = flag("--json", help="Print the addresses as one line of JSON."), **servers: Any) -> None:
    """Run nsqd and nsqlookupd in this process until Ctrl-C or SIGTERM. The nsqds register with the nsqlookupd.

    With --nsqds above 1, all but the first listen on free ports. Port 0 is a free port. Without --data-path nothing
    outlives the process.

    With --redesigned it is a cluster of --nodes nsqds and --lookupds nsqlookupds. Topics are created there before they
    are used: POST /topic/create of the first nsqlookupd.
    """
    with stop_signals() as stop, _running(_group(**servers)) as group:
        described = _describe(group)
        click.echo(json.dumps(described) if as_json else _shown(described, servers["redesigned"]))
        stop.wait()


def _topic(text: str) -> tuple[str, str]:
    topic, slash, channel = text.partition("/")
    return options.topic(topic), options.channel(channel) if slash else ""


@options.command(
    "with-broker",
    "Run a program on an embedded broker of its own.",
    more={**_server_options(_FREE, _FREE), "program": argument(nargs=-1, required=True, type=click.UNPROCESSED)},
    context_settings={"allow_interspersed_args": False},
)
def with_broker_command(
    program: tuple[str, ...],
    topics: Sequence[tuple[str, str]] = several(
        "--topic",
        type=options.Kind("topic[/channel]", _topic),
        help="Create a topic, and a channel of it, before the program starts (repeatable).",
    ),
    **servers: Any,
) -> None:
    """Run PROGRAM, with its arguments, on the servers of `nsq-fast broker`, which stop when it ends.

    The servers listen on free ports, or where the options say. A program whose source has a fixed address on this
    machine runs unchanged with that address: --tcp-address 127.0.0.1:4150. Other programs read the addresses,
    with commas between them, from NSQ_LOOKUPD_HTTP_ADDRESSES, NSQD_TCP_ADDRESSES and NSQD_HTTP_ADDRESSES, as the other
    commands do. Handlers under `nsq-fast run` use these servers and no others, whatever addresses they declare.

    The exit code is that of PROGRAM; 128 and more when a signal ended it, 127 when there is no such program. SIGTERM is
    passed on to PROGRAM; Ctrl-C reaches it directly.
    """
    with _running(_group(**servers)) as group:
        _make_topics(group, topics)
        status = _run(program, {**os.environ, **_environment(_describe(group))})
    click.get_current_context().exit(status)


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


def _group(nsqds: int, lookupd: bool, redesigned: bool, nodes: int, lookupds: int, **flags: Any) -> ServerGroup:
    """The servers that the options of a command ask for. Raises UsageError, ConfigError."""
    others = ("nsqds", "lookupd", *_NOT_REDESIGNED) if redesigned else ("nodes", "lookupds", *_CLUSTER_FLAGS)
    for name in filter(_is_given, others):
        raise click.UsageError(
            f"{_flag_name(name)}: {'not for --redesigned' if redesigned else 'for --redesigned only'}"
        )
    if not nsqds and not lookupd:
        raise click.UsageError("--nsqds 0 with --no-lookupd leaves nothing to run")
    lookupd_flags = {name.removeprefix(_LISTEN): flags.pop(name) for name in list(flags) if name.startswith(_LISTEN)}
    lookupd_flags |= {name: flags.pop(name) for name in _LOOKUPD_FLAGS}
    try:
        LookupdOptions.of(lookupd_flags)
    except ConfigError as error:  # of an nsqd there is an option of the same name
        raise click.UsageError(f"of the nsqlookupd: {error}") from error
    if redesigned:
        given = {name: value for name, value in flags.items() if name in _DEFAULTS or _is_given(name)}
        addresses = {
            "nsqds": _all_but_first_free(nodes, given),
            "lookupds": _all_but_first_free(lookupds, lookupd_flags),
        }
        return RedesignedCluster(nodes, lookupds, lookupd_options=lookupd_flags, addresses=addresses, **given)
    of_nsqd = {name: flags[name] for name in _NSQD_FLAGS}
    free = {"nsqds": _all_but_first_free(nsqds, of_nsqd)} if nsqds else None
    return Broker(nsqds, lookupd, lookupd_options=lookupd_flags, addresses=free, **of_nsqd)


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _all_but_first_free(count: int, flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where servers listen: all but the first on free ports, or on paths that are counted."""
    faces = {face: flags[f"{face}_address"] for face in ("tcp", "http")}
    free = {face: (listen_host(at), 0) for face, at in faces.items() if at and not is_path(at)}
    return [{}] + [free] * (count - 1)


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
    def faces(server: ServerAddresses) -> dict[str, str | None]:
        return {"tcp": str(server.tcp), "http": str(server.http)}

    found = addresses_of(group)
    lookupds = [faces(each) for each in found.lookupds]
    nsqds = [{**faces(each), "https": each.https and str(each.https)} for each in found.nsqds]
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
