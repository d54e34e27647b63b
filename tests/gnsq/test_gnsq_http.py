"""gnsq's HTTP clients, and the two deprecated classes, with the embedded servers."""

from __future__ import annotations

import ssl

import pytest

from nsq_fast import gnsq
from nsq_fast.gnsq.httpclient import USERAGENT, HTTPClient


class Https:
    """As much of urllib3.HTTPSConnectionPool as matters."""

    scheme = "https"


@pytest.fixture
def nsqd_client(nsq_broker):
    return gnsq.NsqdHTTPClient(*nsq_broker.nsqd.http_address)


@pytest.fixture
def lookupd(nsq_broker):
    return gnsq.LookupdClient.from_url(f"http://{nsq_broker.lookupd.http_address}/")


def test_nsqd_is_published_to_and_administered(nsqd_client):
    assert nsqd_client.ping() == b"OK"
    assert "version" in nsqd_client.info()
    assert nsqd_client.publish("topic", "text is sent as UTF-8: é") == b"OK"
    assert nsqd_client.multipublish("topic", iter([b"a", "b"])) == b"OK"
    assert nsqd_client.multipublish("topic", [b"a\nb", b"c"], binary=True) == b"OK"
    with pytest.raises(gnsq.errors.NSQException, match="newline"):
        nsqd_client.multipublish("topic", [b"a\nb"])
    nsqd_client.create_channel("topic", "channel")
    nsqd_client.pause_channel("topic", "channel")
    (topic,) = nsqd_client.stats(topic="topic")["topics"]
    assert topic["message_count"] == 5
    assert topic["channels"][0]["paused"] is True
    assert b"topic" in nsqd_client.stats(text=True)
    for call in (nsqd_client.unpause_channel, nsqd_client.empty_channel, nsqd_client.delete_channel):
        call("topic", "channel")
    for call in (nsqd_client.pause_topic, nsqd_client.unpause_topic, nsqd_client.empty_topic, nsqd_client.delete_topic):
        call("topic")
    with pytest.raises(gnsq.errors.NSQHttpError, match="404"):
        nsqd_client.delete_topic("topic")
    with pytest.raises(ValueError, match="topic"):
        nsqd_client.publish("no topic", b"x")


def test_nsqlookupd_is_asked_and_administered(lookupd, nsqd_client, nsq_broker):
    assert lookupd.ping() == b"OK"
    with pytest.raises(gnsq.errors.NSQHttpError):
        lookupd.lookup("topic")
    lookupd.create_topic("topic")
    lookupd.create_channel("topic", "channel")
    assert lookupd.topics() == {"topics": ["topic"]}
    assert lookupd.channels("topic") == {"channels": ["channel"]}
    assert lookupd.lookup("topic")["channels"] == ["channel"]
    assert len(lookupd.nodes()["producers"]) == 1
    lookupd.tombstone_topic("topic", str(nsq_broker.nsqd.http_address))
    lookupd.delete_channel("topic", "channel")
    lookupd.delete_topic("topic")


def test_options_of_connection_pools_are_understood(tmp_path):
    client = HTTPClient("host", 1, connection_class=Https, timeout=3.5, maxsize=4, retries=0, cert_reqs="CERT_NONE")
    assert (client.scheme, client.host, client.port, client.address) == ("https", "host", 1, "https://host:1/")
    assert repr(client) == "<HTTPClient 'https://host:1/'>"
    assert client.useragent == USERAGENT
    assert gnsq.NsqdHTTPClient.from_url("https://host:7", ssl_context=ssl.create_default_context()).scheme == "https"
    with pytest.raises(ValueError, match="no_such"):
        HTTPClient("host", 1, no_such=1)


def test_lookupd_can_be_made(nsq_broker):
    with pytest.deprecated_call():
        lookupd = gnsq.Lookupd(f"http://{nsq_broker.lookupd.http_address}/")
    assert lookupd.ping() == b"OK"
    with pytest.deprecated_call():
        assert lookupd.base_url == lookupd.address
    lookupd.create_topic("topic")
    with pytest.deprecated_call():
        lookupd.tombstone_topic_producer("topic", "127.0.0.1:4151")


def test_nsqd_speaks_http_until_it_is_connected(nsq_broker):
    tcp, http = nsq_broker.nsqd.tcp_address, nsq_broker.nsqd.http_address
    with pytest.deprecated_call():
        nsqd_client = gnsq.Nsqd(tcp.host, tcp.port, http.port)
        same = gnsq.Nsqd(tcp.host, tcp.port, http.port)
    assert nsqd_client == same
    assert str(nsqd_client) == str(tcp)
    assert nsqd_client.base_url == f"http://{http}/"
    assert nsqd_client.publish("topic", b"over http") == b"OK"
    assert nsqd_client.multipublish("topic", [b"over", b"http"]) == b"OK"
    with pytest.deprecated_call():
        assert nsqd_client.publish_http("topic", b"x") == b"OK"
    nsqd_client.connect()
    nsqd_client.publish("topic", b"over tcp")
    nsqd_client.check_ok()
    nsqd_client.multipublish("topic", [b"over", b"tcp"])
    nsqd_client.check_ok()
    assert nsqd_client.stats()["topics"][0]["message_count"] == 7
    nsqd_client.close_stream()
    with pytest.raises(AttributeError):
        _ = nsqd_client.no_such_attribute
