"""The lookupds that are asked: those that were configured, and those that they name as members of their cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from time import monotonic

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import LOOKUPDS_LEARNT
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT

from .lookupd import Lookupd
from .net.http import Endpoint, parse_endpoint

MAX_LOOKUPDS = 64
"""Most lookupds that are asked, the ones learnt from others included."""

log = logging.getLogger("nsq_fast.lookup")


class LookupdList:
    """Some lookupds. Raises ConfigError for an address that cannot be used."""

    def __init__(self, lookupds: str | Iterable[str | tuple[str, int]], config: LookupConfig, access: str) -> None:
        self._config = config
        self._access = access
        self._seeds = _parse(lookupds)
        self._listings: dict[Endpoint, tuple[Endpoint, ...]] = {}
        self._known = {endpoint: self._lookupd(endpoint) for endpoint in self._seeds}

    def __iter__(self) -> Iterator[Lookupd]:
        return iter(list(self._known.values()))

    def free(self, now: float) -> list[Lookupd]:
        """Whom to ask: those that work and those whose turn to be tried it is; all of them when none works."""
        known = list(self)
        if any(lookupd.failures == 0 for lookupd in known):
            known = [lookupd for lookupd in known if lookupd.is_preferred(now)]
        return [lookupd for lookupd in known if not lookupd.is_busy]

    def working(self) -> list[Lookupd]:
        """Those whose last answer was good; all of them when none is."""
        return [lookupd for lookupd in self if lookupd.failures == 0] or list(self)

    def failure(self) -> str:
        """Why lookupds did not answer the last time; empty when all did."""
        return "; ".join(lookupd.last_error for lookupd in self if lookupd.last_error)

    def grow(self, lookupd: Lookupd) -> bool:
        """Ask a lookupd that works which others there are; whether any is new."""
        addresses = lookupd.list_lookupds(monotonic()) if lookupd.failures == 0 else None
        if addresses is None:
            return False
        self._listings[lookupd.endpoint] = tuple(Endpoint(lookupd.endpoint.scheme, each) for each in addresses)
        listed = (endpoint for listing in self._listings.values() for endpoint in listing)
        wanted = list(dict.fromkeys([*self._seeds, *listed]))[: max(MAX_LOOKUPDS, len(self._seeds))]
        new = [endpoint for endpoint in wanted if endpoint not in self._known]
        self._known = {endpoint: self._known.get(endpoint) or self._lookupd(endpoint) for endpoint in wanted}
        self._listings = {source: listing for source, listing in self._listings.items() if source in self._known}
        if new:
            log.info("learnt of lookupds %s from %s", ", ".join(map(str, new)), lookupd.endpoint, extra=LOOKUPDS_LEARNT)
        return bool(new)

    def _lookupd(self, endpoint: Endpoint) -> Lookupd:
        return Lookupd(endpoint, self._config, self._access)


def _parse(lookupds: str | Iterable[str | tuple[str, int]]) -> tuple[Endpoint, ...]:
    if isinstance(lookupds, str):
        lookupds = [part for part in lookupds.split(",") if part.strip()]
    elif not isinstance(lookupds, Iterable):
        raise ConfigError(f"lookupd addresses must be a string or a list of them, not {lookupds!r}")
    found = tuple(dict.fromkeys(parse_endpoint(each, DEFAULT_LOOKUPD_HTTP_PORT) for each in lookupds))
    if not found:
        raise ConfigError("no lookupd address is given")
    return found
