"""The lookupds that are asked: configured ones, those that an etcd names, and those that they name themselves.

What they name are the other members of their cluster. The program may add and
remove some at run time.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from gevent import sleep

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.log_events import ETCD_FAILED, ETCD_LOOKUPDS, ETCD_RECOVERED, LOOKUPDS_LEARNT
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT
from nsq_fast.protocol.backoff import source_delay
from nsq_fast.protocol.lookup_schedule import preferred

from .lookupd import Lookupd, LookupdOrigin
from .net.http import Endpoint, parse_endpoint
from .supervised import Supervisor

if TYPE_CHECKING:
    from nsq_fast.protocol.dynamic_config import DynamicConfig

    from .lookupd_source import LookupdSource

MAX_LOOKUPDS = 64
"""Most lookupds that are asked, the ones learnt from others included."""
_ETCD_URLS = ("etcd://", "etcds://")

LookupdArgument: TypeAlias = str | Iterable[str | tuple[str, int] | LookupdOrigin]

log = logging.getLogger("nsq_fast.lookup")


class LookupdList:
    """Some lookupds. Raises ConfigError for an address that cannot be used.

    Attributes:
        sources: the etcds that name some.
    """

    def __init__(self, lookupds: LookupdArgument, config: LookupConfig, access: str) -> None:
        self._config = config
        self._access = access
        self._configured, self.sources = _parse(lookupds, config)
        self._added: tuple[Endpoint, ...] = ()
        self._removed: frozenset[Endpoint] = frozenset()
        self._listings: dict[Endpoint, tuple[Endpoint, ...]] = {}
        self._known: dict[Endpoint, Lookupd] = {}
        self.rebuild()

    def __iter__(self) -> Iterator[Lookupd]:
        return iter(list(self._known.values()))

    def free(self, now: float) -> list[Lookupd]:
        """Whom to ask: those that work and those whose turn to be tried it is; all of them when none works."""
        return [lookupd for lookupd in preferred(list(self), now) if not lookupd.is_busy]

    def working(self) -> list[Lookupd]:
        """Those whose last answer was good; all of them when none is."""
        return [lookupd for lookupd in self if lookupd.failures == 0] or list(self)

    def failure(self) -> str:
        """Why lookupds did not answer the last time; empty when all did."""
        problems = [] if self._known else [source.problem for source in self.sources]
        return "; ".join([*problems, *(lookupd.last_error for lookupd in self if lookupd.last_error)])

    def grow(self, lookupd: Lookupd) -> bool:
        """Ask a lookupd that works which others there are; whether any is new."""
        addresses = lookupd.list_lookupds(monotonic()) if lookupd.failures == 0 else None
        if addresses is None:
            return False
        self._listings[lookupd.endpoint] = tuple(Endpoint(lookupd.endpoint.scheme, each) for each in addresses)
        new = self.rebuild()
        if new:
            log.info("learnt of lookupds %s from %s", ", ".join(map(str, new)), lookupd.endpoint, extra=LOOKUPDS_LEARNT)
        return bool(new)

    def change(self, added: tuple[Endpoint, ...], removed: frozenset[Endpoint]) -> bool:
        """Ask ``added``, too, and never ``removed``, whoever names them; whether that changes who is asked."""
        before = set(self._known)
        self._added, self._removed = added, removed
        self.rebuild()
        return set(self._known) != before

    def rebuild(self) -> list[Endpoint]:
        """Put together whom to ask, from all who name lookupds; returns those that were not asked before."""
        found = (endpoint for source in self.sources for endpoint in source.found)
        seeds = list(dict.fromkeys([*self._configured, *found, *self._added]))
        listed = (endpoint for listing in self._listings.values() for endpoint in listing)
        wanted = list(dict.fromkeys([*seeds, *listed]))[: max(MAX_LOOKUPDS, len(seeds))]
        wanted = [endpoint for endpoint in wanted if endpoint not in self._removed]
        new = [endpoint for endpoint in wanted if endpoint not in self._known]
        self._known = {endpoint: self._known.get(endpoint) or self._lookupd(endpoint) for endpoint in wanted}
        self._listings = {source: listing for source, listing in self._listings.items() if source in self._known}
        return new

    def _lookupd(self, endpoint: Endpoint) -> Lookupd:
        return Lookupd(endpoint, self._config, self._access)


def parse_lookupds(lookupds: Iterable[Any]) -> tuple[Endpoint, ...]:
    """Addresses of lookupds, without repeats. Raises ConfigError."""
    return tuple(dict.fromkeys(parse_endpoint(each, DEFAULT_LOOKUPD_HTTP_PORT) for each in lookupds))


def lookupd_changes(config: DynamicConfig, lookup: object | None) -> tuple[tuple[Endpoint, ...], frozenset[Endpoint]]:
    """The nsqlookupds that a document adds and removes. Raises ConfigError for a client that asks none."""
    found = parse_lookupds(config.lookupds.add), frozenset(parse_lookupds(config.lookupds.remove))
    if lookup is None and any(found):
        raise ConfigError("lookupds: this client was made without lookupd_http_addresses, and asks no nsqlookupd")
    return found


def _parse(lookupds: LookupdArgument, config: LookupConfig) -> tuple[tuple[Endpoint, ...], list[LookupdSource]]:
    """The addresses of lookupds, and the etcds that name others."""
    if isinstance(lookupds, str):
        lookupds = [part.strip() for part in lookupds.split(",") if part.strip()]
    elif not isinstance(lookupds, Iterable):
        raise ConfigError(f"lookupd addresses must be a string or a list of them, not {lookupds!r}")
    given = list(lookupds)
    origins = [each for each in given if _names_others(each)]
    found = parse_lookupds(each for each in given if not _names_others(each))
    if not found and not origins:
        raise ConfigError("no lookupd address is given")
    return found, _sources(origins, config) if origins else []


def _names_others(lookupd: object) -> bool:
    """Whether it is the etcd of a cluster, and no nsqlookupd."""
    return isinstance(lookupd, LookupdOrigin) or (isinstance(lookupd, str) and lookupd.startswith(_ETCD_URLS))


def _sources(origins: list[Any], config: LookupConfig) -> list[LookupdSource]:
    from .lookupd_source import LookupdSource, etcds_of  # most programs have no etcd

    urls = [each.strip() for each in origins if isinstance(each, str)]
    others = [each for each in origins if not isinstance(each, str)]
    return [LookupdSource(origin, config) for origin in [*others, *etcds_of(urls, config)]]


class Follower:
    """Keeps up with the lookupds that an etcd names, in its ``loop``. The last ones stay while it does not answer.

    ``on_new()`` is called when there are some that were not asked before.
    """

    def __init__(
        self, source: LookupdSource, lookupds: LookupdList, on_new: Callable[[], object], supervisor: Supervisor
    ) -> None:
        self._source = source
        self._lookupds = lookupds
        self._on_new = on_new
        self.loop = supervisor.loop(f"nsq_fast lookup through {source}", self._run)

    def _run(self) -> None:
        failures = 0
        said = ""
        while True:
            try:
                self._source.read()
                if self._lookupds.rebuild():
                    log.info(
                        "%s names lookupds %s",
                        self._source,
                        ", ".join(map(str, self._source.found)),
                        extra=ETCD_LOOKUPDS,
                    )
                    self._on_new()
                if not self._source.problem:
                    if said:
                        log.warning(
                            "lookup through %s works again; it had failed: %s", self._source, said, extra=ETCD_RECOVERED
                        )
                    failures, said = 0, ""
                    self._source.wait()
                    continue
            except NsqError as error:
                self._source.problem = self._source.problem or f"{self._source}: {error}"
            if not said:
                said = self._source.problem
                log.warning("lookup through %s; asking again", said, extra=ETCD_FAILED)
            sleep(source_delay(failures, random.random))
            failures += 1
