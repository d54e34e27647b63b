"""A stopped server's ports are there for its next start: nobody else gets them in between."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from support.ports import accepts, is_free

from nsq_fast.broker import Broker, BrokerProcess, ClusterProcess, LookupdServer, NsqdServer, RedesignedCluster


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("make", [NsqdServer, LookupdServer])
def test_a_server_finds_its_ports_again(make: Callable[[], Any], end: str) -> None:
    with make() as server:
        addresses = [server.tcp_address, server.http_address]
        getattr(server, end)()
        for address in addresses:
            assert not accepts(address)
            assert not is_free(address)
        server.start()
        assert [server.tcp_address, server.http_address] == addresses
        assert all(map(accepts, addresses))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_process_finds_its_ports_again(end: str) -> None:
    with BrokerProcess() as process:
        addresses = [process.nsqd.tcp, process.nsqd.http, process.lookupd.tcp, process.lookupd.http]
        getattr(process, end)()
        for address in addresses:
            assert not accepts(address)
            assert not is_free(address)
        process.start()
        assert all(map(accepts, addresses))


def test_a_node_finds_its_ports_again_also_after_a_restart_of_all() -> None:
    with ClusterProcess(nodes=2, lookupds=1) as process:
        process.restart()
        address = process.nsqds[1].tcp
        process.kill_node(1)
        assert not accepts(address)
        assert not is_free(address)
        process.restart_node(1)
        assert accepts(address)


@pytest.mark.parametrize("make", [Broker, RedesignedCluster, BrokerProcess])
def test_the_end_of_a_with_lets_the_ports_go(make: Callable[[], Any]) -> None:
    with make() as group:
        nsqd = group.nsqds[0]
        address = nsqd.tcp if make is BrokerProcess else nsqd.tcp_address
        group.kill()
        assert not is_free(address)
    assert is_free(address)


def test_ports_are_let_go_by_a_call() -> None:
    with NsqdServer() as server:
        server.stop()
        server.release_ports()
        assert is_free(server.tcp_address)
        server.start()
        assert accepts(server.tcp_address)


def test_ports_of_a_server_that_is_gone_are_let_go() -> None:
    server = LookupdServer()
    server.start()
    address = server.tcp_address
    server.stop()
    assert not is_free(address)
    del server
    gc.collect()
    assert is_free(address)


def test_another_server_may_be_started_on_a_port_that_is_held() -> None:
    with NsqdServer() as server:
        server.stop()
        with BrokerProcess(lookupd=False, tcp_address=str(server.tcp_address)) as other:
            assert other.nsqd.tcp == server.tcp_address
            with pytest.raises(OSError, match=f"in use.*{server.tcp_address.port}"):
                server.start()
        server.start()
        assert accepts(server.tcp_address)
