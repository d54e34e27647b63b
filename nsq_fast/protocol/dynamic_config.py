"""The document of dynamic configuration: what may stand in it, what is wrong, what changes.

Pure: where documents come from, and what is done with them, is elsewhere. A
document is taken as a whole or refused as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT, check_topic, parse_address

ALL_TOPICS = "*"
"""In ``trace``: every topic that is not named."""

MAX_DOCUMENT_SIZE = 1024 * 1024
"""Bytes."""

_SCHEMES = ("http://", "https://")


class LookupdChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """nsqlookupds that are asked beside those that the program names, and those that are asked no longer."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


class DynamicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a document says.

    Attributes:
        trace: topic -> true, false, or the share of its messages that is traced.
    """

    trace: dict[str, bool | float] = {}
    lookupds: LookupdChanges = LookupdChanges()

    @staticmethod
    def schema() -> dict[str, Any]:
        """The JSON schema of documents."""
        return msgspec.json.schema(DynamicConfig)

    def share(self, topic: str) -> float | None:
        """How much of a topic is traced, 0 to 1; None where the document does not say."""
        found = self.trace.get(topic, self.trace.get(ALL_TOPICS))
        return None if found is None else float(found)


NOTHING = DynamicConfig()


def parse(content: bytes | str | Mapping[str, Any], form: str = "json") -> DynamicConfig:
    """Read and check a document: JSON or TOML as text, or a mapping. Raises ConfigError, which says what is wrong."""
    try:
        found = _decode(content, form)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"not a document of dynamic configuration: {error}") from error
    _check_topics("trace", (topic for topic in found.trace if topic != ALL_TOPICS))
    for topic, share in found.trace.items():
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"trace.{topic}={share!r}: must be true, false, or a share of 0 to 1")
    for field in ("add", "remove"):
        _check_lookupds(f"lookupds.{field}", getattr(found.lookupds, field))
    both = set(found.lookupds.add) & set(found.lookupds.remove)
    if both:
        raise ConfigError(f"lookupds: {', '.join(sorted(both))} is in add and in remove")
    return found


def _decode(content: bytes | str | Mapping[str, Any], form: str) -> DynamicConfig:
    if isinstance(content, Mapping):
        return msgspec.convert(content, DynamicConfig)
    if len(content) > MAX_DOCUMENT_SIZE:
        raise ValueError(f"it has {len(content)} bytes, more than {MAX_DOCUMENT_SIZE}")
    if form == "toml":
        return msgspec.toml.decode(content, type=DynamicConfig)
    if form == "json":
        return msgspec.json.decode(content, type=DynamicConfig)
    raise ValueError(f"form={form!r}: must be json or toml")


def _check_topics(field: str, topics: Iterable[str]) -> None:
    for topic in topics:
        try:
            check_topic(topic)
        except NameInvalid as error:  # noqa: PERF203
            raise ConfigError(f"{field}: {error}") from None


def _check_lookupds(field: str, addresses: Iterable[str]) -> None:
    for address in addresses:
        rest = next((address.removeprefix(scheme) for scheme in _SCHEMES if address.startswith(scheme)), address)
        try:
            parse_address(rest.removesuffix("/"), DEFAULT_LOOKUPD_HTTP_PORT)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from None


def changes(before: DynamicConfig, after: DynamicConfig) -> str:
    """What is different, in one line for people to read; empty when nothing is."""
    return "; ".join(_changes(before, after))


def _changes(before: DynamicConfig, after: DynamicConfig) -> Iterator[str]:
    for topic in sorted({*before.trace, *after.trace}):
        if before.trace.get(topic) != after.trace.get(topic):
            yield f"trace {topic}: {_traced(before.trace.get(topic))} -> {_traced(after.trace.get(topic))}"
    for field in ("add", "remove"):
        old, new = getattr(before.lookupds, field), getattr(after.lookupds, field)
        if set(old) != set(new):
            yield f"lookupds.{field}: {', '.join(old) or 'none'} -> {', '.join(new) or 'none'}"


def _traced(share: bool | float | None) -> str:
    if share is None:
        return "as the program says"
    return {0.0: "off", 1.0: "on"}.get(float(share), f"{share * 100:.6g} %")
