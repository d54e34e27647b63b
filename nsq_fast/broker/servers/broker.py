"""``Broker``: some nsqds and an nsqlookupd together, in this process, ready to use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsq_fast.broker.options import LookupdOptions, NsqdOptions
from nsq_fast.errors import ConfigError

from .group import ServerGroup, count_up, listen_options
from .lookupd import LookupdServer
from .nsqd import NsqdServer

REGISTER_TIMEOUT = 10.0


class Broker(ServerGroup):
    """Embedded NSQ: ``with Broker() as broker: broker.nsqd.tcp_address``.

    Everything listens on free ports of loopback unless told otherwise, and runs
    in the hub of the thread that starts it: block that thread, and nothing is served.

    Args:
        nsqds: how many nsqds.
        lookupd: whether there is an nsqlookupd, at which the nsqds register.
        data_path: folder where messages and metadata survive; each nsqd of several has a folder below it.
            It is made if there is none.
        lookupd_options: of the nsqlookupd.
        addresses: where to listen, as ``{"nsqds": [{"tcp": (host, port), "http": ..., "https": ...}],
            "lookupd": {...}}``; what is left out is as the options say.
        options: of every nsqd; an address with a port of its own is for the first, others count up from it.

    Attributes:
        nsqds: the ``NsqdServer``s.
        lookupd: the ``LookupdServer``, or None.
    """

    def __init__(
        self,
        nsqds: int = 1,
        lookupd: bool = True,
        data_path: str | os.PathLike[str] | None = None,
        *,
        lookupd_options: Mapping[str, Any] | None = None,
        addresses: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check_arguments(nsqds, data_path, {"lookupd_options": lookupd_options, "addresses": addresses})
        super().__init__()
        self._addresses = addresses or {}
        self.lookupd: LookupdServer | None = None
        if lookupd:
            fixed = listen_options(self._addresses.get("lookupd"))
            self.lookupd = LookupdServer(LookupdOptions.of({**(lookupd_options or {}), **fixed}))
        paths = _data_paths(data_path, nsqds)
        self.nsqds = [NsqdServer(self._nsqd_options(number, path, options)) for number, path in enumerate(paths)]

    @property
    def nsqd(self) -> NsqdServer:
        """The first nsqd."""
        return self.nsqds[0]

    @property
    def servers(self) -> Mapping[str, NsqdServer | LookupdServer]:
        """All servers by name: ``nsqd0``, ..., ``lookupd``."""
        nsqds: dict[str, NsqdServer | LookupdServer] = {f"nsqd{n}": nsqd for n, nsqd in enumerate(self.nsqds)}
        return nsqds if self.lookupd is None else {**nsqds, "lookupd": self.lookupd}

    def _start(self) -> None:
        if self.lookupd is not None:
            self.lookupd.start()
            for nsqd in self.nsqds:
                nsqd.register_at(self.lookupd.tcp_address)
        for nsqd in self.nsqds:
            if nsqd.options.data_path is not None:
                Path(nsqd.options.data_path).mkdir(parents=True, exist_ok=True)
            nsqd.start()
        if self.lookupd is not None:
            for nsqd in self.nsqds:
                nsqd.wait_registered(REGISTER_TIMEOUT)

    def _nsqd_options(self, number: int, data_path: str | None, options: Mapping[str, Any]) -> NsqdOptions:
        base = NsqdOptions.of({**options, "data_path": data_path})
        changes: dict[str, Any] = {"node_id": (base.node_id + number) % 1024}
        if number:
            for name in ("tcp_address", "http_address", "https_address"):
                changes[name] = count_up(getattr(base, name), number)
        fixed = self._addresses.get("nsqds", ())
        if number < len(fixed):
            changes.update(listen_options(fixed[number]))
        return base.replace(**changes)


def _check_arguments(nsqds: object, data_path: object, mappings: Mapping[str, object]) -> None:
    if not isinstance(nsqds, int) or nsqds < 0:
        raise ConfigError(f"nsqds={nsqds!r}: must be a whole number, 0 or more")
    if data_path is not None and not isinstance(data_path, (str, os.PathLike)):
        raise ConfigError(f"data_path={data_path!r}: must be a path, or None")
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r}: must be a mapping, or None")


def _data_paths(data_path: str | os.PathLike[str] | None, count: int) -> Sequence[str | None]:
    if data_path is None:
        return [None] * count
    if count == 1:
        return [os.fspath(data_path)]
    return [os.fspath(Path(data_path) / f"nsqd{number}") for number in range(count)]
