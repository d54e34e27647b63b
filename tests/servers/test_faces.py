"""Redesigned clusters through every face: order, keys, receipts, headers."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from support.cluster import Network, missing_for_namespaces
from support.contract import FACES, Face
from support.fleet import Fleet
from support.servers import RealLookupd, RealNsqd
from support.waiting import WAIT, until

from nsq_fast import LookupdHTTPClient, Message, NsqdHTTPClient, Receipt
from nsq_fast.client.admin import ClusterAdmin
from nsq_fast.errors import RequeueMessage
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER
from nsq_fast.threads import Consumer, Producer

KEYS = [f"key {number}" for number in range(5)]
COUNT = 100


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Face:
    found: Face = request.param
    return found


def test_ordered_partitions_come_in_order_one_at_a_time_with_their_receipts(fleet: Fleet, face: Face) -> None:
    topic = f"ordered_{face.name}"
    fleet.create_topic(topic, 2, 2, channels=("ch",), ordered=True)
    seen: dict[int | None, list[int]] = defaultdict(list)
    of_key: dict[str, set[int | None]] = defaultdict(set)
    traced: dict[int, Message] = {}
    running: set[int | None] = set()
    overlaps: list[int | None] = []
    receipts: dict[int, Any] = {}

    async def handle(_consumer: Any, message: Message) -> None:
        if message.partition in running:
            overlaps.append(message.partition)
        running.add(message.partition)
        number = int(message.body)
        await face.sleep(0.001)  # sleep: the work; another handler of the partition would begin meanwhile
        seen[message.partition].append(number)
        of_key[KEYS[number % len(KEYS)]].add(message.partition)
        traced[number] = message
        running.discard(message.partition)

    async def main() -> None:
        async with face.client("Producer", lookupd_http_addresses=fleet.lookupds) as producer:
            for number in range(COUNT):
                options = {"timeout": WAIT, "key": KEYS[number % len(KEYS)], "trace_id": number + 1}
                receipts[number] = await face(producer.publish(topic, b"%d" % number, **options))
        options = {"ordered": True, "max_in_flight": 20, "concurrency": 2, "lookupd_http_addresses": fleet.lookupds}
        async with face.client("Consumer", topic, "ch", message_handler=handle, **options):
            await face.until(lambda: len(traced) == COUNT)

    face.run(main())
    assert all(isinstance(receipt, Receipt) for receipt in receipts.values())
    assert overlaps == []
    assert len(seen) == 2
    for numbers in seen.values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers))
    assert all(len(partitions) == 1 for partitions in of_key.values())
    for number, message in traced.items():
        assert message.trace_id == receipts[number].trace_id == number + 1
        assert message.internal_id == receipts[number].internal_id


def test_headers_and_tags_go_through(fleet: Fleet, face: Face) -> None:
    topic = f"ext_{face.name}"
    fleet.create_topic(topic, 1, 2, channels=("ch",), ext=True)
    headers: dict[bytes, dict[str, str]] = {}

    async def handle(_consumer: Any, message: Message) -> None:
        headers[message.body] = dict(message.headers)

    async def main() -> None:
        lookupds = {"lookupd_http_addresses": fleet.lookupds}
        async with face.client("Producer", **lookupds) as producer:
            for number in range(10):
                given = {"timeout": WAIT, "headers": {"number": str(number)}}
                await face(producer.publish(topic, b"%d" % number, **given))
        async with face.client("Consumer", topic, "ch", message_handler=handle, max_in_flight=10, **lookupds):
            await face.until(lambda: len(headers) == 10)

    face.run(main())
    assert all(found["number"] == body.decode() for body, found in headers.items())


def test_copies_of_a_write_that_was_tried_again_are_suppressed(fleet: Fleet, face: Face) -> None:
    """The second attempt comes whole, to another partition; handlers fail, and leaders move."""
    topic = f"suppressed_{face.name}"
    fleet.create_topic(topic, 2, 2, channels=("ch",), ext=True, multi_part=True)
    everything = {b"%d" % number for number in range(COUNT)}
    ids: dict[bytes, set[bytes]] = defaultdict(set)
    handled: set[bytes] = set()

    async def handle(_consumer: Any, message: Message) -> None:
        ids[message.body].add(message.id)
        if message.attempts == 1 and int(message.body) % 2:
            raise RequeueMessage(0.01)
        handled.add(message.body)

    async def main() -> None:
        lookupds = {"lookupd_http_addresses": fleet.lookupds}
        options = {"max_in_flight": 20, "suppress_retried": COUNT, **lookupds}
        async with (
            face.client("Producer", **lookupds) as producer,
            face.client("Consumer", topic, "ch", message_handler=handle, **options) as consumer,
        ):
            for numbers in (range(COUNT // 2), range(COUNT // 2, COUNT)):
                for partition in (0, 1):
                    for number in numbers:
                        given = {"partition": partition, "headers": {IDEMPOTENCE_HEADER: f"write-{number}"}}
                        await face(producer.publish(topic, b"%d" % number, timeout=WAIT, **given))
                await face.do(fleet.wait_stable)
                await face.until(lambda: fleet.move_leader(topic, 0))
            # A leader that has moved may deliver a copy again: more than COUNT may be suppressed.
            await face.until(
                lambda: (
                    handled == everything
                    and fleet.unanswered(topic, "ch") == 0
                    and consumer.stats().totals.suppressed >= COUNT
                ),
                about=lambda: (len(handled), consumer.stats()),
            )

    face.run(main())
    assert {body: len(found) for body, found in ids.items()} == dict.fromkeys(everything, 1)


# Why a consumer does nothing, where servers of each kind have to say it. All reasons: sim/test_sim_progress.


_numbers = itertools.count()


@pytest.fixture
def original(real_lookupd: Callable[..., RealLookupd], real_nsqd: Callable[..., RealNsqd]) -> tuple[str, list[str]]:
    lookupd = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    with NsqdHTTPClient.from_url(str(nsqd.http_address)) as client:
        client.create_topic("t")
        client.create_channel("t", "ch")
    with LookupdHTTPClient.from_url(str(lookupd.http_address)) as client:
        until(lambda: "t" in client.topics()["topics"])  # nsqd registers what it has by and by
    return "t", [str(lookupd.http_address)]


@pytest.fixture(params=["original", "embedded_fleet", pytest.param("real_fleet", marks=pytest.mark.timeout(1800))])
def place(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """A topic of a test's own, which has the channel ch, and the nsqlookupds that know of it."""
    servers: Any = request.getfixturevalue(request.param)
    if isinstance(servers, tuple):
        return servers
    topic = f"progress_{next(_numbers)}"
    servers.create_topic(topic, 1, 1)
    return topic, servers.lookupds


def test_a_consumer_says_that_servers_have_paused_its_channel_or_know_no_such_topic(
    place: tuple[str, list[str]],
) -> None:
    topic, lookupds = place
    admin = ClusterAdmin(lookupds)
    admin.pause(topic, "ch")
    with Producer(lookupd_http_addresses=lookupds) as producer:
        producer.publish(topic, b"work", timeout=WAIT)

    def finish(consumer: Any, message: Message) -> None: ...

    def reaches(consumer: Consumer, reason: str) -> None:
        until(lambda: consumer.progress().reason == reason, 2 * WAIT, 0.05, about=consumer.progress)

    options: dict[str, Any] = {"lookupd_http_addresses": lookupds, "lookupd_poll_interval": 1.0}
    with (
        Consumer(f"{topic}_misspelt", "ch", message_handler=finish, **options) as misspelt,
        Consumer(topic, "ch", message_handler=finish, **options) as consumer,
    ):
        reaches(misspelt, "lookup_empty")
        reaches(consumer, "paused_by_server")
        assert consumer.progress().topics[0].connections[0].depth == 1
        admin.unpause(topic, "ch")
        until(lambda: consumer.stats().totals.finished == 1, 2 * WAIT)
        reaches(consumer, "idle")


# Hosts of their own: reached, cut off without a word, and reached again over the connections that they had.


ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
peer, _ = server.accept()
while data := peer.recv(100):
    peer.sendall(data)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    missing = missing_for_namespaces()
    if missing is not None:
        pytest.skip(f"no network namespaces here: {missing}")
    with closing(Network(2)) as network:
        yield network


def test_a_host_that_is_cut_off_says_nothing_and_goes_on_afterwards(network: Network) -> None:
    command = network.command(1, [sys.executable, "-c", ECHO, network.addresses[1]])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            with socket.create_connection((network.addresses[1], 4000), WAIT) as client:
                client.sendall(b"a")
                assert client.recv(1) == b"a"
                network.cut_off(1)
                client.sendall(b"b")
                client.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                network.reconnect(1)
                client.settimeout(WAIT)
                assert client.recv(1) == b"b"
        finally:
            server.kill()
