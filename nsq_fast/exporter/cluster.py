"""Asks the servers of a cluster for their statistics, all at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

from gevent import joinall, spawn
from gevent.lock import BoundedSemaphore

from nsq_fast.config import LookupConfig
from nsq_fast.errors import NsqError
from nsq_fast.log_events import EXPORTER_NSQD_FAILED, EXPORTER_NSQD_RECOVERED, LOOKUP_UNANSWERED
from nsq_fast.runtime import Endpoint, LookupPoller, NsqdHTTPClient

from .figures import Families

logger = logging.getLogger(__name__)

REMEMBERED = 300.0
"""Seconds for which an nsqd that no nsqlookupd names any more is still asked, so that it is seen to be away."""


class Cluster:
    """The servers; lives in one hub.

    Args:
        nsqds: HTTP addresses of nsqds that are always asked.
        lookupds: nsqlookupds that name others.
        timeout: seconds for one server; lookup comes first, so that a scrape takes twice as long at most.
        lookup_config: of the questions to lookup.
        tls_options: for https.
        with_ephemeral: see ``Families``.
    """

    def __init__(
        self,
        nsqds: Sequence[Endpoint],
        lookupds: Sequence[Endpoint],
        *,
        timeout: float,
        lookup_config: LookupConfig,
        tls_options: Any = None,
        with_ephemeral: bool = False,
    ) -> None:
        self._always = [str(nsqd) for nsqd in nsqds]
        self._poller = LookupPoller([str(each) for each in lookupds], lookup_config) if lookupds else None
        self._options = {"timeout": timeout, "tls_options": tls_options}
        self._timeout = timeout
        self._with_ephemeral = with_ephemeral
        self._clients: dict[str, NsqdHTTPClient] = {}
        self._named_at: dict[str, float] = {}
        self._failed: set[str] = set()
        self._lock = BoundedSemaphore()

    def scrape(self) -> list[Any]:
        """The metrics of now, as prometheus_client has them. Servers that do not answer are shown as not up."""
        with self._lock:
            families = Families(self._with_ephemeral)
            nsqds = list(self._nsqds(families))
            answers = dict.fromkeys(nsqds)
            jobs = [spawn(self._ask, nsqd, answers) for nsqd in nsqds]
            joinall(jobs, timeout=self._timeout + 1.0)
            for job in jobs:
                job.kill(block=False)
            for nsqd, stats in answers.items():
                families.add_server("nsqd", _label(nsqd), stats is not None)
                if stats is not None:
                    families.add_stats(_label(nsqd), stats)
            return families.all()

    def _nsqds(self, families: Families) -> Iterator[str]:
        yield from self._always
        if self._poller is None:
            return
        now = monotonic()
        try:
            named = [str(nsqd.http) for nsqd in self._poller.nodes(self._timeout + 1.0) if nsqd.http]
        except NsqError as error:
            logger.warning("no nsqlookupd answers, known nsqds are asked: %s", error, extra=LOOKUP_UNANSWERED)
            named = list(self._named_at)
        self._named_at.update(dict.fromkeys(named, now))
        for nsqd in [each for each, at in self._named_at.items() if now - at > REMEMBERED]:
            del self._named_at[nsqd]
            if nsqd in self._clients:
                self._clients.pop(nsqd).close()
        answering = set(self._poller.answering())
        for lookupd in self._poller.lookupds:
            families.add_server("nsqlookupd", _label(lookupd), lookupd in answering)
        yield from self._named_at

    def _ask(self, nsqd: str, answers: dict[str, Any]) -> None:
        if nsqd not in self._clients:
            self._clients[nsqd] = NsqdHTTPClient.from_url(nsqd, **self._options)
        try:
            answers[nsqd] = self._clients[nsqd].stats(include_clients=False, include_mem=False)
        except NsqError as error:
            if nsqd not in self._failed:
                logger.warning("%s does not say how it is: %s", nsqd, error, extra=EXPORTER_NSQD_FAILED)
            self._failed.add(nsqd)
        else:
            if nsqd in self._failed:
                logger.info("%s says how it is again", nsqd, extra=EXPORTER_NSQD_RECOVERED)
            self._failed.discard(nsqd)


def _label(server: str) -> str:
    return server.removeprefix("http://")
