"""Keeps a client up to date with the document of its config source.

A document that is not valid is refused as a whole, and so is one that cannot be
applied: the one before stays. While the source is away the last good document
stays, too. Each of these is logged once, and so is what a new document changes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from gevent import get_hub, getcurrent, sleep
from gevent.event import Event

from nsq_fast.config_source import ConfigDocument, ConfigSource
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import CONFIG_AWAY, CONFIG_BACK, CONFIG_CHANGED, CONFIG_REFUSED
from nsq_fast.printable import printable
from nsq_fast.protocol.backoff import source_delay
from nsq_fast.protocol.dynamic_config import NOTHING, DynamicConfig, changes, parse
from nsq_fast.runtime.supervised import Loop, Supervisor

log = logging.getLogger("nsq_fast.config")

LONGEST_FIRST = 5.0
"""Seconds for which the start of a client waits for the first document."""

Apply = Callable[[DynamicConfig], object]


class ConfigKeeper:
    """Reads one source for one client.

    Args:
        source: see ``ConfigSource``.
        apply: called with each new document, in the greenlet that reads; must not block. What it refuses with
            ConfigError it must not have begun to apply.
        name: of the client, for logs.

    Attributes:
        config: what is applied now.
        changes: documents that were applied, and ``refused``: those that were not.
    """

    def __init__(self, source: ConfigSource, apply: Apply, supervisor: Supervisor, name: str) -> None:
        self.config = NOTHING
        self.changes = 0
        self.refused = 0
        self._source = source
        self._apply = apply
        self._supervisor = supervisor
        self._name = name
        self._last: ConfigDocument | None = None
        self._problem = ""
        self._refusal = ""
        self._has_asked = Event()
        self._loop: Loop | None = None

    def start(self) -> None:
        """Begin to read. Does nothing when it does already."""
        if self._loop is None:
            self._loop = self._supervisor.loop(f"{self._name} config", self._follow)
            self._loop.start()

    def stop(self) -> None:
        """Read no more; what is applied stays applied. Does not block."""
        loop, self._loop = self._loop, None
        if loop is not None and loop is not getcurrent():
            loop.kill(block=False)

    def wait_first(self, timeout: float = LONGEST_FIRST) -> None:
        """Return when the source has given a document, or failed to, or ``timeout`` seconds are over: that is said.

        In a callback of the hub, where nothing can wait, it returns at once.
        """
        if getcurrent() is not get_hub() and not self._has_asked.wait(timeout):
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
            "routes": {
                topic: {"lookupds": list(route.lookupds), "percent": route.percent, "consume": route.consume}
                for topic, route in self.config.routes.items()
            },
        }

    # Its greenlet

    def _follow(self) -> None:
        failures = 0
        while True:
            try:
                # After a failure any document will do: it says that the source can be read again.
                document = self._source.next(None if self._problem else self._last)
            except Exception as error:  # whatever a source of the program's raises
                self._tell_away(error)
                sleep(source_delay(failures, random.random))
                failures += 1
                continue
            failures = 0
            self._tell_back()
            is_known = self._last is not None and document == self._last
            self._last = document
            if not is_known:
                self._take(document)
            self._has_asked.set()

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
        self._has_asked.set()

    def _tell_back(self) -> None:
        if self._problem:
            log.warning("%s: %s can be read again", self._name, self._source, extra=CONFIG_BACK)
            self._problem = ""
