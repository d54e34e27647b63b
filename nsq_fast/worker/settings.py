"""What a worker is told: the handlers that a program declares, and options from flags, the environment and a TOML file,
checked before anything starts.

What is named in several places counts where it stands first in this order: a flag, ``NSQ_FAST_...`` in the
environment, ``[subscription."topic/channel"]`` in the file, ``[consumer]`` or ``[worker]`` in the file, the
declaration in the program, the default.

Programs import this to declare: it connects nothing, and does not import gevent.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from nsq_fast.config import Config, ConnectionConfig, ConsumerConfig, LookupConfig, option, refuse_unknown
from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.logs import NO_EVENT, JsonFormatter, make_handler
from nsq_fast.names import (
    DEFAULT_NSQD_TCP_PORT,
    check_channel,
    check_topic,
    listed,
    parse_addresses,
    parse_listen_address,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.keywords import SubscriptionKeywords

H = TypeVar("H", bound=Callable[..., Any])

POLICIES = frozenset(("give_up", "blocked_policy", "max_age_policy"))
ARGUMENTS = POLICIES | {"nsqd_tcp_addresses", "lookupd_http_addresses", "start_position"}
"""What a Consumer takes beside its options."""

CONSUMER_OPTIONS = ARGUMENTS.union(*(config.names() for config in (ConsumerConfig, ConnectionConfig, LookupConfig)))
HANDLER_PLACES = ("gevent", "threads")
PLACES = (*HANDLER_PLACES, "asyncio")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


class WorkerConfig(Config, frozen=True):
    """What `nsq-fast run` does around the consumers of a program."""

    processes: int = option(1, "processes that consume", minimum=1, maximum=1024)
    handlers: str = option(
        "gevent",
        "where handlers run that are plain functions: gevent (as greenlets) or threads",
        choices=HANDLER_PLACES,
    )
    drain_timeout: float = option(
        25.0,
        "limit for handlers to finish after SIGTERM, SIGINT, or in a restart; what is unfinished then is requeued",
        unit="s",
        minimum=0.0,
        maximum=86400.0,
    )
    start_timeout: float = option(
        60.0, "limit for a new process to be ready before the old one is ended; then the old one stays", unit="s",
        minimum=0.1,
    )  # fmt: skip
    alive_timeout: float = option(
        60.0, "a process whose event loop has not turned for so long is not alive", unit="s", minimum=5.0
    )
    stall_after: float | None = option(
        None,
        "readiness ends when a consumer has had something to do for so long and has done nothing; 0: never;"
        " None: twice its msg_timeout",
        unit="s", kind=float, minimum=0.0,
    )  # fmt: skip
    restart_delay: float = option(
        1.0, "pause before a process that has ended is started again; doubles", unit="s", minimum=0.0
    )
    max_restart_delay: float = option(30.0, "longest such pause", unit="s", minimum=0.0)
    http: str | None = option(
        None, "where /healthz, /readyz and /metrics are served: host:port, or :port for all interfaces; None: nowhere",
        kind=str,
    )  # fmt: skip
    log_level: str = option(
        "info", "least severe log records that are written: debug, info, warning or error", choices=LOG_LEVELS
    )
    log_format: str = option("text", "log records as text or json, one a line, on stderr", choices=LOG_FORMATS)
    reload: bool = option(False, "for development: restart the processes when a Python file below the folder changes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http is not None:
            parse_listen_address(self.http, "http")


_declared: list[Subscription] = []


@dataclasses.dataclass(frozen=True)
class Subscription:
    """A handler and what it is to consume.

    Attributes:
        handler: as ``message_handler`` of a Consumer, or as ``batch_handler`` with ``batch``.
        place: where it runs: gevent, threads or asyncio; None: asyncio for a coroutine function, threads where
            ``handler_threads`` is given, otherwise as the worker's option ``handlers`` says.
        options: of the Consumer, as declared.
    """

    topic: str
    channel: str
    handler: Callable[..., Any]
    batch: bool = False
    place: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in logs, metrics and configuration: ``topic/channel``."""
        return f"{self.topic}/{self.channel}"

    def place_of(self, handlers: str) -> str:
        """Where the handler runs, with the worker's option ``handlers``."""
        if self.place is not None:
            return self.place
        if _is_coroutine_function(self.handler):
            return "asyncio"
        return "threads" if self.options.get("handler_threads") else handlers


def subscribe(
    topic: str, channel: str, *, batch: bool = False, place: str | None = None, **options: Unpack[SubscriptionKeywords]
) -> Callable[[H], H]:
    """Declare that a function handles the messages of a topic and channel; it is returned as it is.

    Args:
        batch: it takes a list of messages, as a ``batch_handler``.
        place: where it runs, see ``Subscription``.
        options: of ``nsq_fast.Consumer``. Where the servers are may be left to the configuration of the worker.

    Raises ConfigError or NameInvalid for what is wrong, where it is declared.
    """
    check_topic(topic)
    check_channel(channel)
    refuse_unknown(options, CONSUMER_OPTIONS)
    if place is not None and place not in PLACES:
        raise ConfigError(f"place={place!r}: must be one of {', '.join(PLACES)}, or None")

    def declare(handler: H) -> H:
        if not callable(handler):
            raise ConfigError(f"subscribe({topic!r}, {channel!r}): {handler!r} cannot be called")
        if place not in (None, "asyncio") and _is_coroutine_function(handler):
            raise ConfigError(f"place={place!r}: {handler!r} is a coroutine function, which runs with asyncio only")
        _declared.append(Subscription(topic, channel, handler, batch, place, {**options}))
        return handler

    return declare


def declared(handler: object = None) -> list[Subscription]:
    """All that were declared in this interpreter, or those of one handler."""
    return [each for each in _declared if handler is None or each.handler is handler]


def _is_coroutine_function(handler: Any) -> bool:
    """Also of an object whose class has an ``async def __call__``."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


PREFIX = "NSQ_FAST_"
FILE_VARIABLE = "NSQ_FAST_CONFIG"
_CONFIGS = (WorkerConfig, ConsumerConfig, ConnectionConfig, LookupConfig)
_NAMED_AGE_POLICIES = ("finish", "give_up")
_OF_WORKER = WorkerConfig.names()
_FROM_OUTSIDE = CONSUMER_OPTIONS - POLICIES | {"max_age_policy"}  # of the policies the one that may be a word
_NAMES = _OF_WORKER | _FROM_OUTSIDE
_MAPPINGS = frozenset(
    {"tls_options", "lookupd_tls_options", "ext_filter", "discovery_filter"}
)  # as JSON, where all is text
_COMPANIONS = {"tls_options": {"tls_v1": True}}
"""What an option is refused without, and may come from another source."""

_TABLES = ("worker", "consumer", "subscription")
_CLOSE_ENOUGH = 0.85


class Given(NamedTuple):
    """One option with a value, and where it was found."""

    name: str
    value: Any
    source: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """All of it, checked.

    Attributes:
        general: options of consumers in ``[consumer]`` of the file.
        special: those of ``[subscription."topic/channel"]``, by that name.
        overriding: those of flags and the environment.
    """

    worker: WorkerConfig = dataclasses.field(default_factory=WorkerConfig)
    general: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    special: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    overriding: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def options_of(self, subscription: Subscription) -> dict[str, Any]:
        """The options of the Consumer of a subscription."""
        special = self.special.get(subscription.name, {})
        defaults = {"requeue_unfinished": True}
        return {**defaults, **subscription.options, **self.general, **special, **self.overriding}


class SettingsReader:
    """Collects options from their sources, and everything that is wrong with them.

    Attributes:
        faults: one sentence for each wrong key, with its source and what is allowed.
        doubts: of keys that are taken for somebody else's, although they look like ours.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.doubts: list[str] = []

    def read(self, file: str | None, environment: Mapping[str, str], flags: Iterable[Given]) -> Settings:
        """The settings. Raises ConfigError with all faults, one a line."""
        file = file or environment.get(FILE_VARIABLE)
        tables = dict(self._in_file(Path(file))) if file else {}
        overriding = self._checked([*self._in_environment(environment), *flags], _NAMES)
        worker = tables.pop("worker", {}) | {name: overriding[name] for name in overriding.keys() & _OF_WORKER}
        if self.faults:
            raise ConfigError("\n".join(self.faults))
        of_consumers = {name: value for name, value in overriding.items() if name not in _OF_WORKER}
        return Settings(WorkerConfig(**worker), tables.pop("consumer", {}), tables, of_consumers)

    def _in_file(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """``worker``, ``consumer`` and each ``topic/channel`` that has a table there, with its options."""
        try:
            content = msgspec.toml.decode(path.read_bytes())
        except OSError as error:
            self.faults.append(f"{path}: cannot be read: {error.strerror or error}")
            return
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            self.faults.append(f"{path}: cannot be read as TOML: {error}")
            return
        for table, value in content.items():
            if table not in _TABLES or not isinstance(value, dict):
                self.faults.append(f"{path}: {table!r}: must be one of the tables {', '.join(_TABLES)}")
            elif table != "subscription":
                yield table, self._in_table(path, table, value, _OF_WORKER if table == "worker" else _FROM_OUTSIDE)
            else:
                for name, special in value.items():
                    if isinstance(special, dict) and "/" in name:
                        yield name, self._in_table(path, f'subscription."{name}"', special, _FROM_OUTSIDE)
                    else:
                        said = 'must be a table, [subscription."topic/channel"]'
                        self.faults.append(f"{path}: subscription.{name}: {said}")

    def _in_table(self, path: Path, table: str, values: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
        return self._checked((Given(name, value, f"{path} [{table}]") for name, value in values.items()), known)

    def _in_environment(self, environment: Mapping[str, str]) -> Iterator[Given]:
        names = {f"{PREFIX}{name.upper()}": name for name in _NAMES}
        for variable, value in sorted(environment.items()):
            if variable in names:
                yield Given(names[variable], value, variable)
            elif variable.startswith(PREFIX) and variable != FILE_VARIABLE:
                # Orchestrators make variables of the names of services: what is unknown may be theirs.
                near = difflib.get_close_matches(variable, names, n=1, cutoff=_CLOSE_ENOUGH)
                self.doubts += [f"{variable} is not known and has no effect; did you mean {name}?" for name in near]

    def _checked(self, found: Iterable[Given], known: frozenset[str]) -> dict[str, Any]:
        """The options that are right, each checked alone; of one that is there twice the last."""
        right = {}
        for given in found:
            try:
                right[given.name] = _checked_alone(given, known)
            except (ConfigError, NameInvalid, TypeError) as error:  # noqa: PERF203  # each fault is said
                self.faults.append(f"{given.source}: {error}")
        return right


def _checked_alone(given: Given, known: frozenset[str]) -> Any:
    """The value. Raises ConfigError, or what parses it, where it is wrong whatever the other options are."""
    name, value, _ = given
    try:
        refuse_unknown({name: value}, known)
    except ConfigError as error:
        raise ConfigError(f"{error}; allowed are {', '.join(sorted(known))}") from None
    if name in _MAPPINGS and isinstance(value, str):
        value = _mapping(name, value)
    if name == "nsqd_tcp_addresses":
        parse_addresses(value, DEFAULT_NSQD_TCP_PORT)
    elif name == "lookupd_http_addresses":
        from nsq_fast.client.lookup import parse_lookupds  # commands that start others do without

        parse_lookupds(listed(value, name))
    elif name == "max_age_policy":
        if value not in _NAMED_AGE_POLICIES:
            raise ConfigError(f"max_age_policy={value!r}: must be one of {', '.join(_NAMED_AGE_POLICIES)}")
    elif name not in ARGUMENTS:
        for config in _CONFIGS:
            if name in config.names():
                config.of({name: value, **_COMPANIONS.get(name, {})})
    return value


def _mapping(name: str, text: str) -> dict[str, Any]:
    """What a variable of the environment, or a flag, has as text; errors do not show it."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f'{name}: must be an object of JSON, such as {{"cafile": "ca.pem"}}: {error}') from None


@dataclasses.dataclass(frozen=True)
class Task:
    """All that a process has to know. It may hold secrets, so it is neither an argument nor in the environment: it is
    pickled to the standard input.

    Attributes:
        target, folder: what to run, see ``load`` of the child.
        is_check: whether the process shall only say what it would run.
    """

    target: str
    folder: str
    settings: Settings
    is_check: bool = False


TEXT = "%(asctime)s %(levelname)s [%(process)d] %(name)s %(event)s: %(message)s"


def write_logs(config: WorkerConfig) -> None:
    """Have all log records written to stderr, as the options say. Repeats are limited of those of nsq_fast only: what
    a program says is its own business."""
    text = logging.Formatter(TEXT, defaults={"event": NO_EVENT})
    formatter = JsonFormatter({"process": os.getpid()}) if config.log_format == "json" else text
    ours, others = make_handler(), make_handler(first=0)
    ours.addFilter(_is_ours)
    others.addFilter(lambda record: not _is_ours(record))
    for handler in (ours, others):
        handler.setFormatter(formatter)
    logging.basicConfig(handlers=[ours, others], level=config.log_level.upper(), force=True)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "nsq_fast"
