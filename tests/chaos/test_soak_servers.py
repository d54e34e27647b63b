"""The servers of a soak: they come back where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.original import OriginalServers
from support.ports import is_free

from nsq_fast.runtime import NsqdHTTPClient


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_server_finds_its_ports_again(tmp_path: Path, end: str) -> None:
    with OriginalServers(tmp_path) as servers:
        nsqd = servers.server("nsqd0")
        addresses = [nsqd.tcp, nsqd.http]
        getattr(nsqd, end)()
        assert not any(map(is_free, addresses))
        nsqd.start()
        assert [nsqd.tcp, nsqd.http] == addresses
        with NsqdHTTPClient(*nsqd.http) as client:
            client.ping()
