"""Where a channel begins when somebody says so: the embedded cluster and a real one say the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer, detail
from support.sites import OurSite, RealSite, Site, publish
from support.wire import WireClient

END_OF_FILE, NOT_FOUND = "commit log end of file", "search commit log data not found"
WITHOUT_RECORD = {
    "timestamp:0": END_OF_FILE,
    "timestamp:99999999999": END_OF_FILE,
    "timestamp:-5": "Invalid timestamp -5",
    "timestamp:9223372037": "Invalid timestamp 9223372037",
    "virtual_queue:0": END_OF_FILE,
    "virtual_queue:-1": END_OF_FILE,
    "virtual_queue:99999999": END_OF_FILE,
    "virtual_queue:-999999": END_OF_FILE,
    "virtual_queue:-1000000": NOT_FOUND,
    "msgcount:0": END_OF_FILE,
    "msgcount:99999999": END_OF_FILE,
    "msgcount:-1000000": NOT_FOUND,
    "special:-1": None,
    "special:0": "not supported offset type",
}
"""What is answered in an empty partition; None: OK."""

WITH_RECORDS = {
    "timestamp:0": b"a",
    "timestamp:99999999999": b"end",
    "timestamp:9223372036": b"end",
    "virtual_queue:0": b"a",
    "virtual_queue:-1": b"a",
    "virtual_queue:-999999": b"a",
    "virtual_queue:1": b"b",
    "virtual_queue:99999999": b"end",
    "msgcount:-1": b"a",
    "msgcount:0": b"a",
    "msgcount:1": b"a",
    "msgcount:2": b"b",
    "msgcount:3": b"c",
    "msgcount:4": b"end",
    "msgcount:99999999": b"end",
    "special:-1": b"end",
}
"""The first message that comes when the partition has a, b and c; "end" is published behind the subscription."""

REFUSED_ALWAYS = ("timestamp:-5", "timestamp:9223372037", "virtual_queue:-1000000", "msgcount:-1000000", "special:0")
SEARCHES = {
    "count&search_pos=1": (404, END_OF_FILE),
    "count&search_pos=99": (404, END_OF_FILE),
    "count&search_pos=-1000000": (404, NOT_FOUND),
    "virtual_offset&search_pos=0": (404, END_OF_FILE),
    "virtual_offset&search_pos=99999999": (404, END_OF_FILE),
}
EMPTY, FILLED = "empty", "filled"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["embedded", "real"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster of one node, with a topic that nothing is published to, and another one."""
    if request.param == "real":
        request.getfixturevalue("wants_real")
    made: Site = OurSite(1) if request.param == "embedded" else RealSite(tmp_path_factory.mktemp("site") / "0", 1)
    try:
        made.create_topic(EMPTY)
        made.create_topic(FILLED)
        yield made
    finally:
        made.stop()


def subscribe(node: Any, topic: str, channel: str, position: str) -> str | None:
    """The text of the error that ends the connection; None: OK.

    The channel has to be a new one: a position is only looked at when no other client is there, and one that has left
    may be counted for a while.
    """
    with closing(WireClient(node.tcp_address)) as client:
        answer = client.command(f"SUB_ADVANCED {topic} {channel} 0 {position}\n".encode())
    return None if answer == b"OK" else answer.decode().removeprefix("E_INVALID ")


def set_offset(node: Any, topic: str, channel: str, position: str) -> tuple[int, str | None]:
    """The status, and the message of an error."""
    path = f"/channel/setoffset?topic={topic}&partition=0&channel={channel}"
    answer = ask(node.http_address, "POST", path, position.encode())
    return answer.status, None if answer.status == 200 else answer.json["message"]


def test_an_empty_partition_has_no_position_but_its_end(site: Site) -> None:
    node = site.nodes[0]
    answers = {position: subscribe(node, EMPTY, f"c{at}", position) for at, position in enumerate(WITHOUT_RECORD)}
    assert answers == WITHOUT_RECORD
    over_http = {position: set_offset(node, EMPTY, "c0", position) for position in WITHOUT_RECORD}
    assert over_http == {position: (500 if text else 200, text) for position, text in WITHOUT_RECORD.items()}


def test_no_message_of_an_empty_partition_is_found(site: Site) -> None:
    path = f"/message/get?topic={EMPTY}&partition=0&search_mode="
    answers = {query: ask(site.nodes[0].http_address, "GET", path + query) for query in SEARCHES}
    assert {query: (answer.status, answer.json["message"]) for query, answer in answers.items()} == SEARCHES


def test_a_position_beyond_the_records_is_their_end(site: Site) -> None:
    node = site.nodes[0]
    publish(node, FILLED, b"a", b"b", b"c")
    refused = {position: subscribe(node, FILLED, f"r{at}", position) for at, position in enumerate(REFUSED_ALWAYS)}
    assert refused == {position: WITHOUT_RECORD[position] for position in REFUSED_ALWAYS}
    consumers = {}
    for number, position in enumerate(WITH_RECORDS):
        consumers[position] = Consumer(node, f"SUB_ADVANCED {FILLED} c{number} 0 {position}")
    publish(node, FILLED, b"end")
    assert {position: detail(consumer.receive())[2] for position, consumer in consumers.items()} == WITH_RECORDS
    for consumer in consumers.values():
        consumer.close()
