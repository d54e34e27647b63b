"""The nsqlookupds: what can be asked of one, how it has been doing, and which there are.

The list grows by what they say of each other. When they are asked, and about what, stands in ``lookup``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, HttpError, NsqError, printable
from nsq_fast.log_events import LOOKUPD_FAILED, LOOKUPD_RECOVERED, LOOKUPDS_LEARNT
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT, Addresses
from nsq_fast.protocol.rdy import grown
from nsq_fast.protocol.topology import (
    ACCEPT,
    LookupAnswer,
    Nsqd,
    is_unknown_topic,
    parse_listlookup,
    parse_lookup,
    parse_nodes,
    parse_topics,
)

from .http import Endpoint, HttpClient, parse_endpoint

if TYPE_CHECKING:
    from nsq_fast.names import Address

    from .lookup import PolledTopic
    from .loop import Loop


MAX_LOOKUPDS = 64
"""Most lookupds that are asked, the ones learnt from others included."""

MAX_SKIPPED_POLLS = 8

_MAX_REPLY_SIZE = 8 * 1024 * 1024
# Of an answer about one topic: what JSON takes for an nsqd at most, and for the names of channels. It is decoded in one
# piece, and so holds the loop up for 10 ms a megabyte.
_PRODUCER_SIZE = 2 * 1024
_CHANNELS_SIZE = 256 * 1024
_RELIST_POLLS = 10

log: logging.Logger = logging.getLogger("nsq_fast.lookup")


class Lookupd:
    """A lookup service: what can be asked of it, and how it has been doing.

    One that keeps failing is asked at every second, fourth, then eighth poll only, as long as others work.
    The methods that ask it raise HttpError or RemoteProtocolError.

    Attributes:
        failures: rounds one after the other in which it gave no good answer.
        is_busy: whether it still owes answers of a round.
        skipped: topics that others were asked about meanwhile.
        last_error: why the last question had no good answer; empty when it had one.
    """

    def __init__(self, endpoint: Endpoint, config: LookupConfig, access: str) -> None:
        self.endpoint = endpoint
        self.failures: int = 0
        self.is_busy = False
        self.skipped: dict[PolledTopic, None] = {}
        self.last_error: str = ""
        self._access = access
        self._max_producers = config.lookupd_max_producers
        self._interval = config.lookupd_poll_interval
        self._is_listing_bad = False
        self._retry_at = self._list_at = 0.0
        headers = {"Accept": ACCEPT}
        if config.lookupd_authorization:
            headers["Authorization"] = config.lookupd_authorization
        self._http = HttpClient(
            endpoint,
            timeout=config.lookupd_timeout,
            headers=headers,
            tls_options=config.lookupd_tls_options,
            max_reply_size=_MAX_REPLY_SIZE,
        )

    async def lookup(self, loop: Loop, topic: str) -> LookupAnswer:
        """Ask where ``topic`` lives; the empty answer, with its problem, when it does not know it."""
        # youzan/nsq: nsqlookupd/http.go, doLookup; the original ignores all but the topic
        query = {"topic": topic, "access": self._access, "metainfo": "true"}
        size = min(_CHANNELS_SIZE + self._max_producers * _PRODUCER_SIZE, _MAX_REPLY_SIZE)
        try:
            reply = await self._http.ask(loop, "GET", "/lookup", query, max_reply_size=size)
            return parse_lookup(reply.body, self._max_producers)
        except HttpError as error:
            if is_unknown_topic(error.status, error.text):
                return LookupAnswer(problem=printable(error.text))
            raise

    async def nodes(self, loop: Loop) -> tuple[Nsqd, ...]:
        return parse_nodes((await self._http.ask(loop, "GET", "/nodes")).body, self._max_producers)

    async def topics(self, loop: Loop) -> tuple[str, ...]:
        # nsqio/nsq: nsqlookupd/http.go, doTopics; youzan/nsq: the same
        return parse_topics((await self._http.ask(loop, "GET", "/topics")).body)

    async def list_lookupds(self, loop: Loop) -> tuple[Address, ...] | None:
        """Ask for the lookupds of its cluster, once a poll interval; None when it was not asked, or does not know.

        Original lookupds have no such route, and are asked again after many intervals only.
        """
        now = monotonic()
        if now < self._list_at:
            return None
        self._list_at = now + self._interval
        try:
            return parse_listlookup((await self._http.ask(loop, "GET", "/listlookup")).body)
        except NsqError as error:
            if isinstance(error, HttpError) and error.status == 404:
                self._list_at = now + self._interval * _RELIST_POLLS
            elif not self._is_listing_bad:
                self._is_listing_bad = True
                text = "lookupd %s does not list the lookupds of its cluster: %s"
                log.warning(text, self.endpoint, error, extra=LOOKUPD_FAILED)
            return None

    def is_preferred(self, now: float) -> bool:
        """Whether it is to be asked now, as long as there are others that work."""
        return self.failures == 0 or now >= self._retry_at

    def succeeded(self) -> None:
        if self.failures:
            text = "lookupd %s answers again after %d failures"
            log.info(text, self.endpoint, self.failures, extra=LOOKUPD_RECOVERED)
        self.failures = 0
        self.last_error = ""

    def failed_for(self, reason: str) -> None:
        if not self.failures:
            log.warning("lookupd %s fails: %s", self.endpoint, reason, extra=LOOKUPD_FAILED)
        self.last_error = reason
        self.failures += 1
        # Half an interval less: jitter must not make it miss the poll that is meant, a refresh in between must.
        polls = grown(1.0, 2.0, self.failures - 1, MAX_SKIPPED_POLLS)
        self._retry_at = monotonic() + self._interval * (polls - 0.5)

    def close(self) -> None:
        self._http.close()


class LookupdList:
    """The lookupds that are asked: configured ones, those the program adds, and those that they name themselves.

    What they name are the other members of their cluster.
    """

    def __init__(self, lookupds: Addresses, config: LookupConfig, access: str) -> None:
        self._config = config
        self._access = access
        self._configured = _parse(lookupds)
        self._added: tuple[Endpoint, ...] = ()
        self._removed: frozenset[Endpoint] = frozenset()
        self._listings: dict[Endpoint, tuple[Endpoint, ...]] = {}
        self._known: dict[Endpoint, Lookupd] = {}
        self._rebuild()

    def __iter__(self) -> Iterator[Lookupd]:
        return iter(list(self._known.values()))

    def free(self, now: float) -> list[Lookupd]:
        """Whom to ask: those that work and those whose turn to be tried it is; all of them when none works."""
        is_any_good = any(lookupd.failures == 0 for lookupd in self)
        return [each for each in self if not each.is_busy and (each.is_preferred(now) or not is_any_good)]

    async def grow(self, loop: Loop, lookupd: Lookupd) -> bool:
        """Ask a lookupd that works which others there are; whether any is new."""
        addresses = await lookupd.list_lookupds(loop) if lookupd.failures == 0 else None
        if addresses is None:
            return False
        self._listings[lookupd.endpoint] = tuple(Endpoint(lookupd.endpoint.scheme, each) for each in addresses)
        new = self._rebuild()
        if new:
            log.info("learnt of lookupds %s from %s", ", ".join(map(str, new)), lookupd.endpoint, extra=LOOKUPDS_LEARNT)
        return bool(new)

    def change(self, added: tuple[Endpoint, ...], removed: frozenset[Endpoint]) -> bool:
        """Ask ``added``, too, and never ``removed``, whoever names them; whether that changes who is asked."""
        before = set(self._known)
        self._added, self._removed = added, removed
        self._rebuild()
        return set(self._known) != before

    def _rebuild(self) -> list[Endpoint]:
        """Put together whom to ask, from all who name lookupds; returns those that were not asked before."""
        seeds = list(dict.fromkeys([*self._configured, *self._added]))
        listed = (endpoint for listing in self._listings.values() for endpoint in listing)
        wanted = list(dict.fromkeys([*seeds, *listed]))[: max(MAX_LOOKUPDS, len(seeds))]
        wanted = [endpoint for endpoint in wanted if endpoint not in self._removed]
        new = [endpoint for endpoint in wanted if endpoint not in self._known]
        self._known = {
            endpoint: self._known.get(endpoint) or Lookupd(endpoint, self._config, self._access) for endpoint in wanted
        }
        self._listings = {source: listing for source, listing in self._listings.items() if source in self._known}
        return new


def parse_lookupds(lookupds: Iterable[Any]) -> tuple[Endpoint, ...]:
    """Addresses of lookupds, without repeats. Raises ConfigError."""
    return tuple(dict.fromkeys(parse_endpoint(each, DEFAULT_LOOKUPD_HTTP_PORT) for each in lookupds))


def _parse(lookupds: Addresses) -> tuple[Endpoint, ...]:
    if isinstance(lookupds, str):
        lookupds = [part.strip() for part in lookupds.split(",") if part.strip()]
    elif not isinstance(lookupds, Iterable):
        raise ConfigError(f"lookupd addresses must be a string or a list of them, not {lookupds!r}")
    found = parse_lookupds(lookupds)
    if not found:
        raise ConfigError("no lookupd address is given")
    return found
