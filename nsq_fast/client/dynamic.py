"""Dynamic configuration: documents from outside, followed while a client runs.

A document is taken as a whole or refused as a whole: one that is not valid, or cannot be applied, leaves the one before
in force. While the source is away the last good document stays, too. Each of these is logged once, and so is what a new
document changes.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, HttpError, NameInvalid, printable
from nsq_fast.log_events import CONFIG_AWAY, CONFIG_BACK, CONFIG_CHANGED, CONFIG_REFUSED
from nsq_fast.names import check_topic
from nsq_fast.protocol.rdy import grown

from .http import HttpClient, check_seconds, parse_endpoint
from .lookup import parse_lookupds
from .loop import Event

if TYPE_CHECKING:
    from .lookup import LookupPoller
    from .loop import Loop, Supervisor, Task
    from .trace import TraceLog


# Where the documents of dynamic configuration come from: the contract of a source, which programs may implement.


class ConfigDocument(NamedTuple):
    """One version of a document.

    Attributes:
        content: JSON or TOML as ``form`` says, or a mapping.
        mark: differs from version to version: a time, an ETag, an index.
    """

    content: bytes | str | Mapping[str, Any]
    mark: Hashable
    form: str = "json"


@runtime_checkable
class ConfigSource(Protocol):
    """Something that a document is read from, for the option ``config_source`` of Consumer and Producer.

    ``str(source)`` is what logs and errors call it. Several clients may share one.
    """

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """Return the document, once there is one that is not ``last``: None stands for any.

        Called in a greenlet of the client, which it may block, and nothing else; killed when the client closes. For a
        client that runs on asyncio it may be ``async def``; if it is not, it is called in a thread of its own, and
        left alone when the client closes. What it raises says why there is no document now: it is called again after a
        pause.
        """


log: logging.Logger = get_logger("nsq_fast.config")

FIRST_RETRY = 0.5
LONGEST_RETRY = 30.0
"""Seconds until a source that could not be read is read again: doubled each time, up to the longest."""

LONGEST_FIRST = 5.0
"""Seconds for which the start of a client waits for the first document."""

_HTTP_PORTS = {"http": 80, "https": 443}
_NOT_MODIFIED = 304

# What may stand in a document, what is wrong with it, and what it changes.

ALL_TOPICS = "*"
"""In ``trace``: every topic that is not named."""

MAX_DOCUMENT_SIZE = 1024 * 1024
"""Bytes."""


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
    lookupds = found.lookupds
    _check("trace", (topic for topic in found.trace if topic != ALL_TOPICS), check_topic)
    for field in ("add", "remove"):
        _check(f"lookupds.{field}", getattr(lookupds, field), lambda each: parse_lookupds((each,)))
    for topic, share in found.trace.items():
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"trace.{topic}={share!r}: must be true, false, or a share of 0 to 1")
    both = set(lookupds.add) & set(lookupds.remove)
    if both:
        raise ConfigError(f"lookupds: {', '.join(sorted(both))} is in add and in remove")
    return found


def _decode(content: bytes | str | Mapping[str, Any], form: str) -> DynamicConfig:
    if isinstance(content, Mapping):
        return msgspec.convert(content, DynamicConfig)
    if len(content) > MAX_DOCUMENT_SIZE:
        raise ValueError(f"it has more than {MAX_DOCUMENT_SIZE} bytes")  # how many, who has read it need not know
    if form == "toml":
        return msgspec.toml.decode(content, type=DynamicConfig)
    if form == "json":
        return msgspec.json.decode(content, type=DynamicConfig)
    raise ValueError(f"form={form!r}: must be json or toml")


def _check(field: str, values: Iterable[str], check: Callable[[str], object]) -> None:
    for value in values:
        try:
            check(value)
        except (ConfigError, NameInvalid) as error:  # noqa: PERF203
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


def apply(config: DynamicConfig, trace: TraceLog, lookup: LookupPoller | None) -> None:
    """Have a client do what a document says. Raises ConfigError where it cannot be done, before any of it is."""
    added, removed = parse_lookupds(config.lookupds.add), frozenset(parse_lookupds(config.lookupds.remove))
    if lookup is None and (added or removed):
        raise ConfigError("lookupds: this client was made without lookupd_http_addresses, and asks no nsqlookupd")
    trace.follow(config.share if config.trace else None)
    if lookup is not None:
        lookup.change_lookupds(added, removed)


# Who reads it, again and again

Apply = Callable[[DynamicConfig], object]


class ConfigKeeper:
    """Reads one source for one client.

    Args:
        source: see ``ConfigSource``.
        apply: called with each new document, in the sequence that reads; must not block. What it refuses with
            ConfigError it must not have begun to apply.
        name: of the client, for logs.

    Attributes:
        config: what is applied now.
        changes: documents that were applied, and ``refused``: those that were not.
    """

    def __init__(self, source: ConfigSource, apply: Apply, name: str) -> None:
        self.config: DynamicConfig = NOTHING
        self.changes: int = 0
        self.refused: int = 0
        self._source = source
        self._apply = apply
        self._name = name
        self._last: ConfigDocument | None = None
        self._problem = ""
        self._refusal = ""
        self._has_asked: Event | None = None
        self._task: Task | None = None

    def start(self, loop: Loop, supervisor: Supervisor) -> None:
        """Begin to read. Does nothing when it does already."""
        if self._task is None:
            self._has_asked = Event(loop)
            self._task = supervisor.keep(f"{self._name} config", lambda: self._follow(loop))

    def stop(self) -> None:
        """Read no more; what is applied stays applied. Does not wait."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def wait_first(self, loop: Loop, timeout: float = LONGEST_FIRST) -> None:
        """Return when the source has given a document, or failed to, or ``timeout`` seconds are over: that is said.

        In a callback of the loop, where nothing can wait, it returns at once.
        """
        if self._has_asked is not None and loop.may_wait() and not await self._has_asked.wait(timeout):
            log.warning(
                "%s: %s has not answered within %g s; going on without it until it does",
                self._name,
                self._source,
                timeout,
                extra=CONFIG_AWAY,
            )

    def stats(self) -> dict[str, Any]:
        """What is applied, and what is wrong.

        ``problem`` says why the source cannot be read now, ``refusal`` why its last document was refused; both are
        empty when all is well.
        """
        return {
            "source": str(self._source),
            "changes": self.changes,
            "refused": self.refused,
            "problem": self._problem,
            "refusal": self._refusal,
            "trace": dict(self.config.trace),
            "lookupds": {"add": list(self.config.lookupds.add), "remove": list(self.config.lookupds.remove)},
        }

    # Its sequence

    async def _follow(self, loop: Loop) -> None:
        failures = 0
        while True:
            try:
                # After a failure any document will do: it says that the source can be read again.
                document = await _next_of(self._source, loop, None if self._problem else self._last)
            except Exception as error:  # whatever a source of the program's raises
                self._tell_away(error)
                await loop.sleep(grown(FIRST_RETRY, 2.0, failures, LONGEST_RETRY) * (0.7 + 0.3 * random.random()))
                failures += 1
                continue
            failures = 0
            self._tell_back()
            is_known = self._last is not None and document == self._last
            self._last = document
            if not is_known:
                self._take(document)
            self._tell_asked()

    def _take(self, document: ConfigDocument) -> None:
        try:
            if not isinstance(document, ConfigDocument):
                raise ConfigError(f"{type(document).__name__}: the source must return a ConfigDocument")
            found = parse(document.content, document.form)
            said = changes(self.config, found)
            if said:
                self._apply(found)
        except ConfigError as error:
            self.refused += 1
            self._refusal = printable(str(error))
            log.error(
                "%s: %s: refused, what was before stays: %s",
                self._name,
                self._source,
                self._refusal,
                extra=CONFIG_REFUSED,
            )
            return
        self._refusal = ""
        if said:
            self.config = found
            self.changes += 1
            log.warning("%s: %s: %s", self._name, self._source, said, extra=CONFIG_CHANGED)

    def _tell_away(self, error: Exception) -> None:
        if not self._problem:
            stays = "what it said last stays" if self._last is not None else "going on without it until it answers"
            shown = printable(repr(error))
            log.warning("%s: %s cannot be read: %s; %s", self._name, self._source, shown, stays, extra=CONFIG_AWAY)
        self._problem = printable(str(error) or repr(error))
        self._tell_asked()

    def _tell_asked(self) -> None:
        if self._has_asked is not None:
            self._has_asked.set()

    def _tell_back(self) -> None:
        if self._problem:
            log.warning("%s: %s can be read again", self._name, self._source, extra=CONFIG_BACK)
            self._problem = ""


async def _next_of(source: Any, loop: Loop, last: ConfigDocument | None) -> ConfigDocument:
    """Ours wait on any loop; one of the program's may be ``async def`` on asyncio, or blocks."""
    if isinstance(source, (FileConfigSource, HttpConfigSource)):
        return await source.next_on(loop, last)
    if iscoroutinefunction(source.next):
        document: ConfigDocument = await source.next(last)
        return document
    return await loop.call_blocking(source.next, last)


class FileConfigSource:
    """A file, read again when it has changed: TOML where its name ends in ``.toml``, JSON otherwise.

    Replace it as a whole (write another one, then rename it): half a document is refused.

    Args:
        path: of the file. It need not exist yet.
        interval: seconds between two looks at it.
    """

    def __init__(self, path: str | os.PathLike[str], interval: float = 1.0) -> None:
        self._path = os.fspath(path)
        self._interval = check_seconds("interval", interval)
        self._form = _form_of(self._path)

    def __str__(self) -> str:
        return f"file {self._path}"

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """As ConfigSource has it. Raises OSError."""
        return _block(self.next_on, last)

    async def next_on(self, loop: Loop, last: ConfigDocument | None) -> ConfigDocument:
        """As ``next``, on any loop."""
        while True:
            status = os.stat(self._path)
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if last is None or mark != last.mark:
                return ConfigDocument(self._read(), mark, self._form)
            await loop.sleep(self._interval)

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:
            return file.read(MAX_DOCUMENT_SIZE + 1)


class HttpConfigSource:
    """A document of an HTTP server, asked for again and again; ETags save the server from sending it each time.

    Args:
        url: of the document. TOML where its path ends in ``.toml``, JSON otherwise.
        interval: seconds between two questions.
        timeout: limit in seconds for one.
        authorization: the Authorization header.
        tls_options: for https: an ssl.SSLContext or a mapping: cafile, certfile, keyfile, server_hostname, verify.

    Raises ConfigError for what cannot be used.
    """

    def __init__(
        self,
        url: str,
        interval: float = 10.0,
        *,
        timeout: float = 5.0,
        authorization: str | None = None,
        tls_options: Any = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _HTTP_PORTS or not parts.netloc or parts.fragment:
            raise ConfigError("url: must be http://host:port/path or https://host:port/path")
        self._interval = check_seconds("interval", interval)
        self._target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        self._form = _form_of(parts.path)
        endpoint = parse_endpoint(f"{parts.scheme}://{parts.netloc}", _HTTP_PORTS[parts.scheme])
        self._shown = f"{endpoint}{parts.path}"
        self._http = HttpClient(
            endpoint,
            timeout=check_seconds("timeout", timeout),
            headers={} if authorization is None else {"Authorization": authorization},
            tls_options=tls_options,
            max_reply_size=MAX_DOCUMENT_SIZE,
        )

    def __str__(self) -> str:
        return self._shown

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        """As ConfigSource has it. Raises HttpError."""
        return _block(self.next_on, last)

    async def next_on(self, loop: Loop, last: ConfigDocument | None) -> ConfigDocument:
        """As ``next``, on any loop."""
        if last is not None:
            await loop.sleep(self._interval)
        while True:
            found = await self._ask(loop, last)
            if found is not None:
                return found
            await loop.sleep(self._interval)

    async def _ask(self, loop: Loop, last: ConfigDocument | None) -> ConfigDocument | None:
        """The document, unless it is the last one."""
        tag = last.mark if last is not None else None
        headers = {"If-None-Match": tag} if isinstance(tag, str) and tag else None
        try:
            reply = await self._http.ask(loop, "GET", self._target, headers=headers)
        except HttpError as error:
            if error.status == _NOT_MODIFIED and last is not None:
                return None
            raise
        if last is not None and reply.body == last.content:
            return None
        return ConfigDocument(reply.body, reply.headers.get("etag", ""), self._form)


def _form_of(name: str) -> str:
    return "toml" if name.endswith(".toml") else "json"


def _block(sequence: Callable[..., Any], *arguments: Any) -> ConfigDocument:
    from .gevent_loop import GeventLoop, run  # whoever blocks is on gevent

    document: ConfigDocument = run(sequence(GeventLoop.here(), *arguments))
    return document
