"""The configuration of a worker, from flags, the environment and a TOML file, checked before anything starts.

What is named in several places counts where it stands first in this order: a flag, ``NSQ_FAST_...`` in the
environment, ``[subscription."topic/channel"]`` in the file, ``[consumer]`` or ``[worker]`` in the file, the
declaration in the program, the default.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig, WorkerConfig, refuse_unknown
from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, listed, parse_addresses

from .subscriptions import ARGUMENTS, CONSUMER_OPTIONS, Subscription

PREFIX = "NSQ_FAST_"
FILE_VARIABLE = "NSQ_FAST_CONFIG"
_CONFIGS = (WorkerConfig, ConsumerConfig, ConnectionConfig, LookupConfig)
_FROM_OUTSIDE = CONSUMER_OPTIONS - {"give_up", "blocked_policy"}
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
        self._worker: dict[str, Given] = {}
        self._general: dict[str, Given] = {}
        self._special: dict[str, dict[str, Given]] = {}
        self._overriding: dict[str, Given] = {}

    def read(self, file: str | None, environment: Mapping[str, str], flags: Iterable[Given]) -> Settings:
        """The settings. Raises ConfigError with all faults, one a line."""
        file = file or environment.get(FILE_VARIABLE)
        if file:
            self._read_file(Path(file))
        self._read_environment(environment)
        for given in flags:
            self._take(given, self._worker if given.name in WorkerConfig.names() else self._overriding)
        settings = self._checked_together()
        if self.faults:
            raise ConfigError("\n".join(self.faults))
        return settings

    def _read_file(self, path: Path) -> None:
        try:
            content = msgspec.toml.decode(path.read_bytes())
        except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
            self.faults.append(f"{path}: cannot be read as TOML: {error}")
            return
        for table, value in content.items():
            if table not in _TABLES or not isinstance(value, dict):
                self.faults.append(f"{path}: {table!r}: must be one of the tables {', '.join(_TABLES)}")
                continue
            if table == "subscription":
                self._read_special(path, value)
            else:
                self._read_table(path, table, value, self._worker if table == "worker" else self._general)

    def _read_special(self, path: Path, tables: Mapping[str, Any]) -> None:
        for name, value in tables.items():
            if not isinstance(value, dict) or "/" not in name:
                self.faults.append(f'{path}: subscription.{name}: must be a table, [subscription."topic/channel"]')
                continue
            self._read_table(path, f'subscription."{name}"', value, self._special.setdefault(name, {}))

    def _read_table(self, path: Path, table: str, values: Mapping[str, Any], taken: dict[str, Given]) -> None:
        known = WorkerConfig.names() if table == "worker" else _FROM_OUTSIDE
        for name, value in values.items():
            given = Given(name, value, f"{path} [{table}]")
            try:
                refuse_unknown({name: value}, known)
            except ConfigError as error:
                self.faults.append(f"{given.source}: {error}; allowed are {', '.join(sorted(known))}")
                continue
            self._take(given, taken)

    def _read_environment(self, environment: Mapping[str, str]) -> None:
        names = {f"{PREFIX}{name.upper()}": name for name in WorkerConfig.names() | _FROM_OUTSIDE}
        for variable, value in sorted(environment.items()):
            if variable in names:
                name = names[variable]
                taken = self._worker if name in WorkerConfig.names() else self._overriding
                self._take(Given(name, value, variable), taken)
            elif variable.startswith(PREFIX) and variable != FILE_VARIABLE:
                # Orchestrators make variables of the names of services: what is unknown may be theirs.
                near = difflib.get_close_matches(variable, names, n=1, cutoff=_CLOSE_ENOUGH)
                self.doubts += [f"{variable} is not known and has no effect; did you mean {name}?" for name in near]

    def _take(self, given: Given, taken: dict[str, Given]) -> None:
        """Check an option alone, and have it take the place of one from a weaker source."""
        try:
            _check_alone(given.name, given.value)
        except (ConfigError, NameInvalid, TypeError) as error:
            self.faults.append(f"{given.source}: {error}")
            return
        taken[given.name] = given

    def _checked_together(self) -> Settings:
        worker = WorkerConfig()
        try:
            worker = WorkerConfig(**_values(self._worker))
        except ConfigError as error:
            self.faults.append(str(error))
        special = {name: _values(taken) for name, taken in self._special.items()}
        return Settings(worker, _values(self._general), special, _values(self._overriding))


def _values(taken: Mapping[str, Given]) -> dict[str, Any]:
    return {name: given.value for name, given in taken.items()}


def _check_alone(name: str, value: Any) -> None:
    """Raise ConfigError, or what parses it, when a name is unknown, or its value wrong whatever the others are."""
    refuse_unknown({name: value}, WorkerConfig.names() | _FROM_OUTSIDE)
    if name == "nsqd_tcp_addresses":
        parse_addresses(value, DEFAULT_NSQD_TCP_PORT, name)
    elif name == "lookupd_http_addresses":
        listed(value, name)
    elif name not in ARGUMENTS:
        for config in _CONFIGS:
            if name in config.names():
                config.of({name: value})
