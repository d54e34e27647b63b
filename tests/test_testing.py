"""The plugin's faulty link does what its switches say."""

import gevent
import pytest
from gevent import socket
from gevent.server import StreamServer


@pytest.fixture
def echo():
    def serve(sock, _peer):
        while data := sock.recv(4096):
            sock.sendall(data)

    server = StreamServer(("127.0.0.1", 0), serve)
    server.start()
    yield ("127.0.0.1", server.server_port)
    server.stop()


def test_bytes_pass_unchanged_however_they_are_cut(echo, nsq_link):
    link = nsq_link(echo)
    link.chunk = 1
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"hello")
        received = b""
        while len(received) < 5:
            received += sock.recv(10)
    assert received == b"hello"


def test_a_stalled_link_is_silent_until_it_flows(echo, nsq_link):
    link = nsq_link(echo)
    with socket.create_connection(link.address) as sock:
        link.stall()
        sock.sendall(b"x")
        with gevent.Timeout(0.05, False):
            sock.recv(1)
            pytest.fail("the link passed data on")
        link.flow()
        assert sock.recv(1) == b"x"


def test_cut_and_refuse_close_connections(echo, nsq_link):
    link = nsq_link(echo)
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        link.cut()
        assert sock.recv(1) == b""
    link.refuse()
    with socket.create_connection(link.address) as sock:
        assert sock.recv(1) == b""
    assert link.connections == 2


@pytest.mark.nsq_broker(nsqds=2, preserve_order=True)
def test_the_broker_fixture_takes_options_from_its_marker(nsq_broker):
    assert [server.nsqd.options.preserve_order for server in nsq_broker.nsqds] == [True, True]


def test_the_broker_fixture_serves(nsq_broker):
    with socket.create_connection(nsq_broker.nsqd.tcp_address) as sock:
        sock.sendall(b"  V2PUB t\n\x00\x00\x00\x01x")
        assert sock.recv(100) == b"\x00\x00\x00\x06\x00\x00\x00\x00OK"


def test_a_garbled_link_sends_bytes_that_are_no_protocol_and_nothing_after_them(echo, nsq_link):
    link = nsq_link(echo)
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        link.garble()
        sock.sendall(b"swallowed")
        with gevent.Timeout(0.05, False):
            sock.recv(1)
            pytest.fail("the link passed on what it should have swallowed")
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"y")
        assert sock.recv(1) == b"y"
