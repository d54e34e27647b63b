"""One lookup service: what can be asked of it, and how it has been doing.

A lookupd that fails is asked again at the next poll; one that keeps failing
at every second, fourth, then eighth poll only. The first good answer makes it
equal to the others again. Each change of state gives one line in the log.
"""

from __future__ import annotations

import logging

from nsq_fast.config import LookupConfig
from nsq_fast.errors import HttpError, NsqError
from nsq_fast.log_events import LOOKUPD_FAILED, LOOKUPD_RECOVERED
from nsq_fast.names import Address
from nsq_fast.printable import printable
from nsq_fast.protocol.lookup_schedule import LookupdHealth
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

from .net.http import Endpoint, HttpClient

MAX_REPLY_SIZE = 8 * 1024 * 1024
# Of an answer about one topic: what JSON takes for an nsqd at most, and for the names of channels. It is decoded in one
# piece, and so holds the hub up for 10 ms a megabyte.
_PRODUCER_SIZE = 2 * 1024
_CHANNELS_SIZE = 256 * 1024
_RELIST_POLLS = 10

log = logging.getLogger("nsq_fast.lookup")


class LookupdOrigin:
    """Base of what stands among the addresses of lookupds and is none: it names them. See ``EtcdLookupds``."""


class Lookupd(LookupdHealth):
    """A lookupd. The methods that ask it raise HttpError or RemoteProtocolError."""

    def __init__(self, endpoint: Endpoint, config: LookupConfig, access: str) -> None:
        super().__init__(config.lookupd_poll_interval)
        self.endpoint = endpoint
        self.is_busy = False
        self.last_error = ""
        self._access = access
        self._max_producers = config.lookupd_max_producers
        self._is_listing_bad = False
        self._list_at = 0.0
        headers = {"Accept": ACCEPT}
        if config.lookupd_authorization:
            headers["Authorization"] = config.lookupd_authorization
        self._http = HttpClient(
            endpoint,
            timeout=config.lookupd_timeout,
            headers=headers,
            tls_options=config.lookupd_tls_options,
            max_reply_size=MAX_REPLY_SIZE,
        )

    def lookup(self, topic: str) -> LookupAnswer:
        """Ask where ``topic`` lives; the empty answer, with its problem, when it does not know it."""
        # youzan/nsq: nsqlookupd/http.go, doLookup; the original ignores all but the topic
        query = {"topic": topic, "access": self._access, "metainfo": "true"}
        size = min(_CHANNELS_SIZE + self._max_producers * _PRODUCER_SIZE, MAX_REPLY_SIZE)
        try:
            reply = self._http.request("GET", "/lookup", query, max_reply_size=size)
            return parse_lookup(reply.body, self._max_producers)
        except HttpError as error:
            if is_unknown_topic(error.status, error.text):
                return LookupAnswer(problem=printable(error.text))
            raise

    def nodes(self) -> tuple[Nsqd, ...]:
        """Ask for every nsqd it knows."""
        return parse_nodes(self._http.request("GET", "/nodes").body, self._max_producers)

    def topics(self) -> tuple[str, ...]:
        """Ask for the names of all topics it knows."""
        # nsqio/nsq: nsqlookupd/http.go, doTopics; youzan/nsq: the same
        return parse_topics(self._http.request("GET", "/topics").body)

    def list_lookupds(self, now: float) -> tuple[Address, ...] | None:
        """Ask for the lookupds of its cluster, once a poll interval; None when it was not asked, or does not know.

        Original lookupds have no such route, and are asked again after many intervals only.
        """
        if now < self._list_at:
            return None
        self._list_at = now + self._interval
        try:
            return parse_listlookup(self._http.request("GET", "/listlookup").body)
        except NsqError as error:
            if isinstance(error, HttpError) and error.status == 404:
                self._list_at = now + self._interval * _RELIST_POLLS
            elif not self._is_listing_bad:
                self._is_listing_bad = True
                log.warning(
                    "lookupd %s does not list the lookupds of its cluster: %s",
                    self.endpoint,
                    error,
                    extra=LOOKUPD_FAILED,
                )
            return None

    def succeeded(self) -> None:
        """It gave a good answer."""
        if self.failures:
            log.info(
                "lookupd %s answers again after %d failures", self.endpoint, self.failures, extra=LOOKUPD_RECOVERED
            )
        super().succeeded()
        self.last_error = ""

    def failed_for(self, reason: str, now: float) -> None:
        """It gave a bad answer or none."""
        if not self.failures:
            log.warning("lookupd %s fails: %s", self.endpoint, reason, extra=LOOKUPD_FAILED)
        self.last_error = reason
        super().failed(now)

    def close(self) -> None:
        """Close the connections that are kept."""
        self._http.close()
