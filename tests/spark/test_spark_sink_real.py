"""A task of the sink against real servers."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from support.cluster import Standalone
from support.servers import RealLookupd, RealNsqd
from support.spark_ledger import account
from support.spark_sink import batch, numbered, taken, write
from support.wire import WireClient

from nsq_fast.errors import RowInvalid, WriteFailed


@pytest.fixture
def original(real_nsqd: Callable[..., RealNsqd]) -> RealNsqd:
    return real_nsqd("-max-msg-size=2000")


def create(nsqd: Standalone, command: bytes) -> None:
    client = WireClient(nsqd.tcp_address)
    assert client.command(b"INTERNAL_CREATE_TOPIC " + command + b"\n") == b"OK"
    client.close()


def test_an_original_nsqd(original: RealNsqd) -> None:
    servers = {"nsqd_tcp_addresses": str(original.tcp_address), "topic": "t"}
    rows = batch(body=numbered(20_000), defer_ms=pa.array([50 if each % 1000 == 0 else None for each in range(20_000)]))
    assert write([rows], **servers).rows == 20_000
    account(numbered(20_000), taken(original.tcp_address, "t", 20_000)).check()
    with pytest.raises(RowInvalid, match="trace_id=1: servers without partitions"):
        write([batch(body=[b"x"], trace_id=[1])], **servers)


def test_what_an_original_nsqd_refuses_is_told(original: RealNsqd) -> None:
    """A limit of the server's own, which nobody knows before."""
    bodies = numbered(3000)
    bodies[1500] = bytes(3000)
    options = {"nsqd_tcp_addresses": str(original.tcp_address), "topic": "t", "nsq.max_pending": "1000"}
    with pytest.raises(WriteFailed, match=r"E_BAD_MESSAGE.*row 1000 of Arrow batch 0 and 999 others") as caught:
        write([batch(body=bodies)], **options)
    stored = caught.value.rows_stored
    assert (stored in (1000, 2000), caught.value.rows_unknown) == (True, 0)  # the third command may be on its way
    account((bodies[:1000] + bodies[2000:])[:stored], taken(original.tcp_address, "t", stored)).check()


def test_an_original_topic_that_lookup_does_not_know_yet(
    real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]
) -> None:
    lookupd = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    report = write([batch(body=numbered(100))], topic="new", lookupd_http_addresses=str(lookupd.http_address))
    assert report.places == {("new", None): 100}
    account(numbered(100), taken(nsqd.tcp_address, "new", 100)).check()


def test_a_redesigned_nsqd(standalone_nsqd: Standalone) -> None:
    create(standalone_nsqd, b"t 0")
    create(standalone_nsqd, b"ext 0 true")
    servers = {"nsqd_tcp_addresses": str(standalone_nsqd.tcp_address)}
    taken(standalone_nsqd.tcp_address, "t", 0, partition=0)  # a channel begins with what comes after it
    rows = batch(body=numbered(5000), partition=pa.array([0] * 5000, pa.int32()))
    assert write([rows], topic="t", **servers).places == {("t", 0): 5000}
    assert taken(standalone_nsqd.tcp_address, "t", 5000, partition=0, advanced=True) == numbered(5000)
    traced = batch(body=numbered(10), partition=pa.array([0] * 10, pa.int32()), trace_id=list(range(-5, 5)))
    table = write([traced], topic="t", **servers).receipt_table()
    assert table["trace_id"].to_pylist() == [-5, -4, -3, -2, -1, 1, 2, 3, 4]
    offsets, sizes = table["offset"].to_pylist(), table["size"].to_pylist()
    assert all(offsets[row] + sizes[row] == offsets[row + 1] for row in (0, 1, 2, 3, 5, 6, 7))
    headed = batch(body=numbered(3), partition=pa.array([0] * 3, pa.int32()), headers=['{"n": "1"}', None, "{}"])
    assert write([headed], topic="ext", **servers).rows == 3
