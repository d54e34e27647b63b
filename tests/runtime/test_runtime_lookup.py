"""The lookup poller of greenlets against lookupds that work, lie, hang and come back.

What holds on every loop stands in tests/client/test_client_lookup.py; what HTTP bounds, in test_client_lookup.py.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing, contextmanager

import gevent
import pytest
from support.http_server import reply, scripted_http
from support.waiting import WAIT, holds, until

from nsq_fast.client.admin import LookupPoller
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, LookupFailed, NameInvalid, NotRunning
from nsq_fast.names import Address

FAST = LookupConfig(lookupd_poll_interval=0.05, lookupd_poll_jitter=0.0, lookupd_timeout=1.0)
CALM = LookupConfig(lookupd_poll_interval=60.0, lookupd_timeout=20.0, lookupd_refresh_interval=0.2)


def peer(port, version="1.3.0"):
    return {"broadcast_address": "10.0.0.1", "tcp_port": port, "http_port": port + 1, "version": version}


def producers(*ports):
    return {"channels": [], "producers": [peer(port) for port in ports]}


def listing(*addresses):
    return {"lookupdnodes": [{"NodeIP": each.host, "HttpPort": str(each.port)} for each in addresses]}


NOT_FOUND = reply(b'{"message":"NOT_FOUND"}', "404 Not Found")
TOPIC_NOT_FOUND = reply(b'{"message":"TOPIC_NOT_FOUND"}', "404 Not Found")


class Routes:
    """A lookupd whose answers the test sets: an object for JSON, bytes to send, or a function of the question."""

    def __init__(self, answer):
        self.answer = answer
        self.lists = NOT_FOUND

    def __call__(self, question):
        answer = self.lists if question.target.startswith("/listlookup") else self.answer
        if callable(answer):
            return answer(question)
        if isinstance(answer, bytes):
            question.send(answer)
        else:
            question.answer(answer)
        return True


@contextmanager
def polling(*answers, config=CALM, **options):
    """A poller of lookupds that answer so, and these."""
    with scripted_http(*map(Routes, answers)) as servers:
        poller = LookupPoller([server.address for server in servers], config, **options)
        poller.start()
        try:
            yield poller, *servers
        finally:
            poller.stop()


def ports(topology):
    return None if topology is None else {nsqd.tcp.port for nsqd in topology.producers}


def hang(question):
    question.hang()


# What a poll finds


@pytest.mark.parametrize("access", ["r", "w"])
def test_the_role_metadata_and_accept_header_are_always_sent(access):
    questions = []

    def answer(question):
        questions.append(question)
        question.answer(producers(1))

    config = CALM.replace(lookupd_authorization="Bearer s3cret")
    with polling(answer, config=config, access=access) as (poller, _):
        poller.wait_topology("t#ephemeral", WAIT)
    assert questions[0].target == f"/lookup?topic=t%23ephemeral&access={access}&metainfo=true"
    assert "Accept: application/vnd.nsq; version=1.0\r\n" in questions[0].head
    assert "Authorization: Bearer s3cret\r\n" in questions[0].head
    assert "s3cret" not in repr(config)


def test_a_topic_that_nobody_knows_yet_is_asked_for_again_and_again(caplog):
    """Within seconds, not at the next poll in a minute; and said once, not at each question."""
    found = []
    listener = lambda _, topology: found.append(ports(topology))  # noqa: E731
    with polling(TOPIC_NOT_FOUND, TOPIC_NOT_FOUND, listener=listener) as (poller, first, second):
        assert poller.wait_topology("t", WAIT).is_empty
        poller.add_topic("t")
        until(lambda: first.count("/lookup") >= 4)
        second.script.answer = producers(7)
        until(lambda: found[-1] == {7})
        assert first.count("/lookup") <= 8  # the pauses grow
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "yet" in text] == ["no nsqlookupd knows topic t yet; asking again until one does"]
    assert [text for text in texts if "is known now" in text] == ["topic t is known now: 1 nsqds, first 10.0.0.1:7"]


def test_a_removed_topic_is_asked_for_no_more():
    heard = []
    with polling(producers(1), config=FAST, listener=lambda topic, _: heard.append(topic)) as (poller, _):
        poller.add_topic("a")
        poller.add_topic("b")
        until(lambda: {"a", "b"} <= set(heard))
        poller.remove_topic("a")
        heard.clear()
        until(lambda: heard.count("b") >= 3)
        assert "a" not in heard
        assert poller.topology("a") is None


# Bad answers


def cut(data):
    """Send this, and end the connection."""
    return lambda question: (question.send(data), question.end())


LIES = {
    "html": reply(b"<html>It works!</html>"),
    "wrong json": reply(b'{"hello": "world"}'),
    "wrong types": reply(b'{"producers": [{"broadcast_address": 1, "tcp_port": "x"}]}'),
    "json cut": reply(b'{"producers": ['),
    "deep json": reply(b"[" * 100_000),
    "status 500": reply(b"{}", "500 Internal Server Error"),
    "status 302": reply(b"", "302 Found", "Location: http://127.0.0.1:1/lookup\r\n"),
    "no such route": NOT_FOUND,
    "closes at once": cut(b""),
    "closes within the body": cut(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    "hangs": hang,
    "hangs within the body": lambda question: (question.send(reply(b"{}" * 10)[:-3]), question.hang()),
    "huge": reply(b'{"channels":[' + b'"c",' * 500_000 + b'"c"],"producers":[]}'),
    "too many": producers(*range(1, 500)),
}
BOUNDED = FAST.replace(lookupd_max_producers=100)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_lookupd_is_ignored_and_logged_once(lie, caplog):
    with polling(producers(1), LIES[lie], config=BOUNDED) as (poller, good, bad):
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        until(lambda: bad.count("/lookup") >= 2 and good.count("/lookup") >= 4)
        assert ports(poller.topology("t")) == {1}
    failures = [record for record in caplog.records if str(bad.address) in record.getMessage()]
    assert [record.levelno for record in failures] == [logging.WARNING]
    said = {"too many": "names 499 nsqds, more than lookupd_max_producers=100 allows", "huge": "a reply of more than"}
    assert said.get(lie, "") in failures[0].getMessage()


@pytest.mark.parametrize("lie", ["html", "hangs", "closes at once", "status 500", "huge"])
def test_when_every_lookupd_fails_what_was_known_stays(lie):
    heard = []
    with polling(producers(1), config=BOUNDED, listener=lambda _, new: heard.append(new)) as (poller, lookupd):
        known = poller.wait_topology("t", WAIT)
        lookupd.script.answer = LIES[lie]
        count = lookupd.count("/lookup")
        until(lambda: lookupd.count("/lookup") >= count + 2)
        before = len(heard)
        until(lambda: lookupd.count("/lookup") >= count + 3)
        assert len(heard) == before
        assert poller.topology("t") == known
        lookupd.script.answer = producers(2)
        until(lambda: ports(poller.topology("t")) == {2})


def test_a_failing_lookupd_is_asked_less_often_and_promoted_when_it_answers(caplog):
    caplog.set_level(logging.INFO, "nsq_fast.lookup")
    with polling(producers(1), reply(b"", "500 Oh"), config=FAST) as (poller, good, bad):
        poller.add_topic("t")
        until(lambda: good.count("/lookup") >= 24)
        assert 2 <= bad.count("/lookup") <= 8
        bad.script.answer = producers(2)
        until(lambda: ports(poller.topology("t")) == {1, 2})
        asked, others = bad.count("/lookup"), good.count("/lookup")
        until(lambda: good.count("/lookup") >= others + 8)
        assert bad.count("/lookup") - asked >= 6
    fails, again = [text for text in map(str, caplog.messages) if str(bad.address) in text]
    assert "fails" in fails
    assert "answers again" in again


def test_refreshes_without_end_are_a_poll_each_interval():
    with polling(producers(1)) as (poller, lookupd):
        poller.wait_topology("t", WAIT)
        before, began = lookupd.count("/lookup"), time.monotonic()
        while lookupd.count("/lookup") < before + 4:
            poller.refresh("t")
            gevent.sleep(0.001)  # sleep: refreshes again and again
        assert time.monotonic() - began > 2 * CALM.lookupd_refresh_interval


# Growing by /listlookup


def test_the_lookupds_of_a_cluster_are_learnt_from_a_seed_and_forgotten_when_they_are_listed_no_more():
    with scripted_http(Routes(producers(1)), Routes(producers(2))) as (seed, other):
        seed.script.lists = listing(seed.address, other.address)
        poller = LookupPoller([seed.address], FAST)
        poller.start()
        poller.add_topic("t")
        until(lambda: ports(poller.topology("t")) == {1, 2})
        assert poller.lookupds == (f"http://{seed.address}", f"http://{other.address}")
        seed.script.lists = listing()
        until(lambda: poller.lookupds == (f"http://{seed.address}",))  # never the configured ones
        seed.script.lists = listing(*(Address("127.0.0.1", port) for port in range(1, 1000)))
        until(lambda: len(poller.lookupds) > 1)
        assert len(poller.lookupds) <= 64
        poller.stop()


@pytest.mark.parametrize("answer", [NOT_FOUND, reply(b""), reply(b"<html>"), hang, listing()], ids=range(5))
def test_without_listlookup_the_configured_addresses_serve(answer, caplog):
    with scripted_http(Routes(producers(1))) as [seed]:
        seed.script.lists = answer
        poller = LookupPoller([seed.address], CALM)
        poller.start()
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        holds(lambda: poller.lookupds == (f"http://{seed.address}",))
        poller.stop()


# All nsqds


def test_nodes_of_lookupds_that_fail_are_an_error():
    def is_too_old():
        try:
            poller.nodes(0.05)
        except LookupFailed:
            return True
        return False

    with polling(reply(b"<html>")) as (poller, lookupd):
        with pytest.raises(LookupFailed, match="malformed"):
            poller.nodes(WAIT)
        lookupd.script.answer = producers()
        assert poller.nodes(WAIT) == ()
        lookupd.script.answer = hang
        until(is_too_old)


# Arguments


@pytest.mark.parametrize("text", ["{}", "http://{}", "http://{}/", " {} ,"])
def test_a_lookupd_may_be_given_as_text(text):
    with scripted_http(Routes(producers(1))) as [lookupd]:
        poller = LookupPoller(text.format(lookupd.address), CALM)
        poller.start()
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        poller.stop()


@pytest.mark.parametrize(
    "bad", ["", [], "ftp://h:1", "http://h:1/path", "http://user:secret@h:1", "h:0", "h:x", "http://:1", [1], 5, None]
)
def test_addresses_that_cannot_be_used_are_refused(bad):
    with pytest.raises(ConfigError) as error:
        LookupPoller(bad)
    assert "secret" not in str(error.value)


def test_other_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="access"):
        LookupPoller("h:1", access="rw")
    with pytest.raises(ConfigError, match="Authorization"):
        LookupPoller("h:1", LookupConfig(lookupd_authorization="a\r\nb"))
    poller = LookupPoller("h:1")
    with pytest.raises(NameInvalid):
        poller.add_topic("bad topic!")
    with pytest.raises(NotRunning):
        poller.wait_topology("t", 1)


# Real servers


def test_a_real_lookupd(real_lookupd, real_nsqd):
    def found():
        poller.refresh("known")
        topology = poller.topology("known")
        return topology is not None and [nsqd.tcp for nsqd in topology.producers] == [nsqd_tcp]

    lookupd = real_lookupd()
    nsqd_tcp = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}").tcp_address
    poller = LookupPoller([lookupd.http_address], CALM, access="w")
    poller.start()
    try:
        assert poller.wait_topology("unknown", WAIT).is_empty
        until(lambda: [nsqd.tcp for nsqd in poller.nodes(WAIT)] == [nsqd_tcp])
        with closing(gevent.socket.create_connection(tuple(nsqd_tcp))) as sock:
            sock.sendall(b"  V2PUB known\n\x00\x00\x00\x01x")
            sock.recv(64)
        until(found)
    finally:
        poller.stop()
