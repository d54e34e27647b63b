"""Lookup through etcd: which nsqlookupds a cluster has is read there, and followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent.ssl import PROTOCOL_TLS_SERVER, SSLContext
from support.cluster import RedesignedCluster as RealCluster
from support.cluster import missing_for_cluster
from support.etcd import Etcd, RealEtcd, StandInEtcd, has_etcd, register, unregister
from support.ports import free_address
from support.waiting import WAIT, until

from nsq_fast import Consumer, EtcdLookupds, Producer
from nsq_fast.broker import RedesignedCluster
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, LookupFailed
from nsq_fast.names import Address
from nsq_fast.runtime.lookup import LookupPoller
from nsq_fast.runtime.lookupd_list import parse_lookupds

CONFIG = LookupConfig(lookupd_poll_interval=60.0, lookupd_timeout=20.0, lookupd_refresh_interval=0.05)


@pytest.fixture(params=["stand-in", "real"])
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Etcd]:
    if request.param == "real" and not has_etcd():
        pytest.skip("no etcd on PATH")
    server: Etcd = StandInEtcd() if request.param == "stand-in" else RealEtcd(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def stand_in() -> Iterator[StandInEtcd]:
    server = StandInEtcd()
    yield server
    server.stop()


@pytest.fixture
def poll() -> Iterator[Callable[..., LookupPoller]]:
    pollers: list[LookupPoller] = []

    def start(lookupds: Any, config: LookupConfig = CONFIG) -> LookupPoller:
        pollers.append(LookupPoller(lookupds, config))
        pollers[-1].start()
        return pollers[-1]

    yield start
    for each in pollers:
        each.stop()


def urls(*addresses: Address) -> set[str]:
    return {f"http://{address}" for address in addresses}


def test_lookupds_that_register_are_asked_and_those_that_vanish_are_not(
    etcd: Etcd, poll: Callable[..., LookupPoller], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, other = free_address(), free_address(), free_address()
    poller = poll(f"etcd://{etcd.address}/cluster")
    until(lambda: "no nsqlookupd is registered" in caplog.text)
    with pytest.raises(LookupFailed, match="no nsqlookupd is registered"):
        poller.nodes(WAIT)
    register(etcd, "another", "other", other)
    register(etcd, "cluster", "first", first)
    until(lambda: set(poller.lookupds) == urls(first))
    register(etcd, "cluster", "second", second)
    until(lambda: set(poller.lookupds) == urls(first, second))
    unregister(etcd, "cluster", "first")
    until(lambda: set(poller.lookupds) == urls(second))
    assert caplog.text.count("asking again") == 1


def test_what_is_known_stays_while_etcd_is_away(
    etcd: Etcd, poll: Callable[..., LookupPoller], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = free_address(), free_address()
    register(etcd, "cluster", "first", first)
    poller = poll(["127.0.0.1:1", f"etcd://{etcd.address}/cluster"])
    until(lambda: set(poller.lookupds) == {"http://127.0.0.1:1", *urls(first)})
    etcd.stop()
    until(lambda: f"lookup through etcd http://{etcd.address}, cluster cluster" in caplog.text)
    assert set(poller.lookupds) == {"http://127.0.0.1:1", *urls(first)}
    etcd.start()
    register(etcd, "cluster", "second", second)
    until(lambda: urls(second) <= set(poller.lookupds))
    assert "works again" in caplog.text


def test_messages_go_through_a_cluster_that_only_etcd_names(
    etcd: Etcd, cluster: RedesignedCluster, start_consumer: Callable[..., Consumer]
) -> None:
    cluster.create_topic("topic", 2, channels=["channel"])
    for number, lookupd in enumerate(cluster.lookupds):
        register(etcd, "cluster", str(number), lookupd.http_address)
    taken: list[bytes] = []
    start_consumer(
        "topic",
        "channel",
        lookupd_http_addresses=EtcdLookupds([f"http://{etcd.address}"], "cluster"),
        message_handler=lambda _, message: taken.append(message.body),
    )
    with Producer(lookupd_http_addresses=[f"etcd://{etcd.address}/cluster"]) as producer:
        producer.publish("topic", b"one", key="key")
        producer.publish("topic", b"two")
    until(lambda: sorted(taken) == [b"one", b"two"])


def test_a_change_that_etcd_has_forgotten_is_read_again(
    stand_in: StandInEtcd, poll: Callable[..., LookupPoller]
) -> None:
    first, second = free_address(), free_address()
    register(stand_in, "cluster", "first", first)
    poller = poll(f"etcd://{stand_in.address}/cluster")
    until(lambda: any("wait=true" in each for each in stand_in.requests))
    stand_in.stop()
    register(stand_in, "cluster", "second", second)
    stand_in.forget()
    stand_in.start()
    until(lambda: set(poller.lookupds) == urls(first, second))


def test_a_member_that_is_down_is_passed_over(stand_in: StandInEtcd, poll: Callable[..., LookupPoller]) -> None:
    first = free_address()
    register(stand_in, "cluster", "first", first)
    poller = poll(f"etcd://{free_address()}/cluster,etcd://{stand_in.address}/cluster")
    until(lambda: set(poller.lookupds) == urls(first))


def test_an_etcd_with_password_and_certificate(
    tls_files: dict[str, str], poll: Callable[..., LookupPoller], caplog: pytest.LogCaptureFixture
) -> None:
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls_files["cert"], tls_files["key"])
    first = free_address()
    server = StandInEtcd(user="me:secret", ssl_context=context)
    try:
        register(server, "cluster", "first", first)
        address, tls = f"https://{server.address}", {"cafile": tls_files["ca"]}
        right = poll(EtcdLookupds(address, "cluster", username="me", password="secret", tls_options=tls))
        until(lambda: set(right.lookupds) == urls(first))
        wrong = poll(f"etcds://{server.address}/cluster", CONFIG.replace(lookupd_tls_options=tls))
        until(lambda: "The request requires authentication" in caplog.text)
        assert wrong.lookupds == ()
        assert "secret" not in caplog.text
    finally:
        server.stop()


def test_entries_that_are_no_registrations_are_passed_over(
    stand_in: StandInEtcd, poll: Callable[..., LookupPoller]
) -> None:
    first = free_address()
    for number, value in enumerate(
        ["", "{", "[]", '{"NodeIP":"h"}', '{"NodeIP":"a b","HttpPort":"1"}', '{"NodeIP":1}']
    ):
        stand_in.put(f"/NSQMetaData/cluster/NsqlookupdInfo/NsqlookupdNodes/Node-{number}", value)
    register(stand_in, "cluster", "first", first)
    poller = poll(f"etcd://{stand_in.address}/cluster")
    until(lambda: set(poller.lookupds) == urls(first))


def test_lookupds_may_be_added_and_removed_at_run_time(poll: Callable[..., LookupPoller]) -> None:
    first, second = free_address(), free_address()
    poller = poll([first])
    added, removed = parse_lookupds([second]), parse_lookupds([first])
    poller.change_lookupds(added, frozenset(removed))
    assert set(poller.lookupds) == urls(second)
    poller.change_lookupds((), frozenset())
    assert set(poller.lookupds) == urls(first)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("etcd://host:1", "must be etcd://host:port/cluster"),
        ("etcd://host:1/a/b", "must be etcd://host:port/cluster"),
        ("etcd://me:secret@host:1/a", "give EtcdLookupds instead"),
        ("etcd://host:0/a", "a port of 1 to 65535"),
        ("etcd://host:1/a b", "-cluster-id of the servers"),
    ],
)
def test_addresses_that_name_no_etcd_are_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Producer(lookupd_http_addresses=address)
    assert "secret" not in str(caught.value)


def test_a_password_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="give both, or none"):
        EtcdLookupds("host", "cluster", password="secret")


@pytest.mark.real
@pytest.mark.kill
def test_a_real_cluster_is_found_through_its_etcd(tmp_path: Path, start_consumer: Callable[..., Consumer]) -> None:
    missing = missing_for_cluster()
    if missing is not None:
        pytest.skip(missing)
    cluster = RealCluster(tmp_path, nsqds=1, lookupds=2)
    try:
        poller = LookupPoller(f"etcd://{cluster.etcd_address}/{cluster.cluster_id}", CONFIG)
        poller.start()
        until(lambda: set(poller.lookupds) == urls(*cluster.lookupd_addresses))
        (nsqd,) = until(lambda: poller.nodes(WAIT))
        assert nsqd.tcp == cluster.nsqds[0].tcp_address
        poller.stop()
    finally:
        cluster.stop()
