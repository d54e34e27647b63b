"""Option names as Spark passes them on: in lower case, with text as values; and as the documentation writes them.

Spark lower-cases the keys before Python sees them, so an option is recognised
by its letters and digits alone, and error messages show it as the documentation
writes it. Options that begin with ``nsq.`` are those of the client's configs,
with the same names, ranges and messages.

A secret is only accepted under a key whose value Spark's default redaction
hides from plans, the web UI and the event log.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from nsq_fast.config import Config
from nsq_fast.errors import ConfigError

PREFIX = "nsq."
REDACTED = re.compile(r"(?i)secret|password|token|access[.]?key")
"""``spark.redaction.regex``, its default."""

_TLS_FIELDS = ("tls_options", "lookupd_tls_options")
_TLS_PARTS = ("cafile", "certfile", "keyfile", "server_hostname", "verify")
_JSON_FIELDS = frozenset({"ext_filter"})


def normal(key: str) -> str:
    """A key without case and underscores: what Spark leaves of ``startingOffsets`` is found again by it."""
    return key.lower().replace("_", "")


def recognise(options: Mapping[str, str], known: Iterable[str], ignored: Iterable[str] = ()) -> dict[str, str]:
    """The options whose names do not begin with ``nsq.``, under the names in ``known``.

    Raises ConfigError for one that is not known. Values are not shown: there may be a secret in a misspelt one.
    """
    spelt = {normal(name): name for name in known}
    skipped = {normal(name) for name in ignored}
    found: dict[str, str] = {}
    for key, value in options.items():
        if key.lower().startswith(PREFIX) or normal(key) in skipped:
            continue
        name = spelt.get(normal(key))
        if name is None:
            raise ConfigError(f"unknown option {key!r}{_hint(key, spelt)}")
        if name in found and found[name] != value:
            raise ConfigError(f"{name}: is given twice, with and without underscores")
        found[name] = value
    return found


def _hint(key: str, spelt: Mapping[str, str]) -> str:
    with_prefix = {**spelt, **{normal(PREFIX + name): PREFIX + name for name in ("auth_secret", "tls_v1")}}
    near = difflib.get_close_matches(normal(key), with_prefix, n=1)
    return f"; did you mean {with_prefix[near[0]]!r}?" if near else ""


class ClientOptions:
    """The options that begin with ``nsq.``, shared out among the configs that know them.

    Args:
        options: all that Spark gives; the others are passed over.
        kinds: the configs that may be asked for.
        refused: option -> why it has no place here.

    Attributes:
        given: the names of those that were given, without the prefix.
    """

    def __init__(
        self, options: Mapping[str, str], *kinds: type[Config], refused: Mapping[str, str] | None = None
    ) -> None:
        self._kinds = kinds
        self._spelt = _spellings(kinds)
        self._values: dict[str, Any] = {}
        for key, value in options.items():
            if key.lower().startswith(PREFIX):
                self._add(key, value, refused or {})
        self.given = frozenset(self._values)

    def make(self, kind: type[Config], **defaults: Any) -> Any:
        """A config of ``kind``. Raises ConfigError, with the option as it is written for Spark."""
        names = kind.names()
        values = {name: value for name, value in self._values.items() if name in names}
        try:
            return kind(**{**defaults, **values})
        except ConfigError as error:
            raise ConfigError(f"{PREFIX}{error}") from None

    def _add(self, key: str, value: str, refused: Mapping[str, str]) -> None:
        name = self._spelt.get(normal(key[len(PREFIX) :]))
        if name is None:
            near = difflib.get_close_matches(normal(key[len(PREFIX) :]), self._spelt, n=1)
            raise ConfigError(
                f"unknown option {key!r}" + (f"; did you mean {PREFIX + self._spelt[near[0]]!r}?" if near else "")
            )
        if name in refused:
            raise ConfigError(f"{PREFIX}{name}: {refused[name]}")
        whole, part = _tls_part(name)
        if part:
            self._values.setdefault(whole, {})[part] = _tls_value(name, part, value)
            return
        plain = name.removesuffix("_secret") if name not in self._field_names() else name
        if self._is_secret(plain) and not REDACTED.search(name):
            raise ConfigError(f"{PREFIX}{name}: Spark would show its value in plans and logs; {_instead(name)}")
        self._values[plain] = _from_json(name, value) if plain in _JSON_FIELDS else value

    def _field_names(self) -> frozenset[str]:
        return frozenset().union(*(kind.names() for kind in self._kinds))

    def _is_secret(self, name: str) -> bool:
        return any(field.metadata["secret"] for kind in self._kinds for field in fields(kind) if field.name == name)


def _spellings(kinds: tuple[type[Config], ...]) -> dict[str, str]:
    names: list[str] = []
    for field in (field for kind in kinds for field in fields(kind)):
        names.append(field.name)
        if field.name in _TLS_FIELDS:
            names += [f"{field.name.removesuffix('options')}{part}" for part in _TLS_PARTS]
        elif field.metadata["secret"] and not REDACTED.search(field.name):
            names.append(f"{field.name}_secret")
    return {normal(name): name for name in names}


def _instead(name: str) -> str:
    if name in _TLS_FIELDS:
        stem = PREFIX + name.removesuffix("options")
        return f"write {', '.join(stem + part for part in _TLS_PARTS)}"
    return f"write {PREFIX}{name}_secret, whose value it hides"


def _tls_part(name: str) -> tuple[str, str]:
    for whole in _TLS_FIELDS:
        stem = whole.removesuffix("options")
        if name.startswith(stem) and name[len(stem) :] in _TLS_PARTS:
            return whole, name[len(stem) :]
    return name, ""


def _tls_value(name: str, part: str, value: str) -> Any:
    return truth(PREFIX + name, value) if part == "verify" else value


def _from_json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name}={value!r}: must be JSON") from None


def truth(name: str, value: str) -> bool:
    """``true`` or ``false``, as Spark writes them. Raises ConfigError."""
    if value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ConfigError(f"{name}={value!r}: must be true or false")


def whole_number(name: str, value: str, minimum: int) -> int:
    """Raises ConfigError unless ``value`` is a whole number, and not less than ``minimum``."""
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise ConfigError(f"{name}={value!r}: must be a whole number, at least {minimum}")
    return number


_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def milliseconds(name: str, value: str) -> int:
    """A duration as Spark writes it: ``15m``, ``30s``, or milliseconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)\s*(ms|s|m|h|d)?", value.strip().lower())
    if found is None or not int(found[1]):
        raise ConfigError(f"{name}={value!r}: must be a duration as 15m, 30s or 500ms")
    return int(found[1]) * _UNITS[found[2] or "ms"]
