"""Packets get lost for a while, with nobody told: publishes go on soon after, not when the system would try again."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any

import gevent
import pytest
from support.peers import Peer
from support.publishing import Command, Nsqds, Producers, PublishNsqd
from support.waiting import until

from nsq_fast.names import Address
from nsq_fast.testing import FaultyLink

NEVER = 600.0
SLOW_MACHINE = 5.0
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a filter of sockets that drops packets")


class DroppedPackets:
    """A filter of the system drops all that comes for a socket, before TCP has seen it: nothing is acknowledged."""

    ATTACH, DETACH = 26, 27  # linux: include/uapi/asm-generic/socket.h
    RETURN = 0x06

    def __init__(self) -> None:
        self._filter = ctypes.create_string_buffer(struct.pack("HBBI", self.RETURN, 0, 0, 0))
        self._program = struct.pack("HP", 1, ctypes.addressof(self._filter))

    def begin(self, sock: Any) -> None:
        sock.setsockopt(socket.SOL_SOCKET, self.ATTACH, self._program)

    def end(self, sock: Any) -> None:
        sock.setsockopt(socket.SOL_SOCKET, self.DETACH, 0)


class LossyLink(FaultyLink):
    """A link that loses what is sent meanwhile; the kernels of a connection that had to do with it stay silent."""

    is_lossy = False

    def __init__(self, target: Address) -> None:
        super().__init__(target)
        self._silent: set[Any] = set()

    def _pass_on(self, data: bytes, sink: Any) -> None:
        if self.is_lossy:
            self._silent.update(*(pair for pair in self._pairs if sink in pair))
        if sink not in self._silent:
            super()._pass_on(data, sink)


@pytest.fixture
def link(publish_nsqd: Nsqds) -> Iterator[LossyLink]:
    link = LossyLink(publish_nsqd().address)
    yield link
    link.close()


def test_after_an_outage_publishes_go_on_within_two_seconds(link: LossyLink, new_producer: Producers) -> None:
    sender = new_producer(link, attempt_timeout=0.5, publish_timeout=NEVER)
    assert sender.publish("t", b"before") == b"OK"
    link.is_lossy = True
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(10)]
    until(lambda: sender.stats()["stalled"])
    until(lambda: link.connections >= 3)  # fresh ones are tried, in vain
    link.is_lossy = False
    healed = monotonic()
    gevent.joinall(results, timeout=30, raise_error=True)
    assert sender.publish("t", b"after") == b"OK"
    assert monotonic() - healed < 2.0 + SLOW_MACHINE


def test_a_connection_that_was_lost_is_made_anew_within_two_seconds(link: LossyLink, new_producer: Producers) -> None:
    """The tries to connect had to do with the outage as well: none of them is waited for."""
    sender = new_producer(link, attempt_timeout=NEVER, publish_timeout=NEVER, connect_timeout=NEVER)
    assert sender.publish("t", b"before") == b"OK"
    link.is_lossy = True
    link.cut()
    result = sender.publish_nowait("t", b"x")
    until(lambda: link.connections >= 3)
    link.is_lossy = False
    healed = monotonic()
    assert result.get(timeout=30) == b"OK"
    assert monotonic() - healed < 2.0 + SLOW_MACHINE


@on_linux
@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_a_connection_that_nobody_acknowledges_is_given_up_for_a_new_one(
    publish_nsqd: Nsqds, new_producer: Producers, seconds: float
) -> None:
    """Also where a slow server would be given much longer: the system tells one from the other."""
    nsqd, dropped = publish_nsqd(), DroppedPackets()
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER)
    assert sender.publish("t", b"before") == b"OK"
    dropped.begin(nsqd.peers[0].sock)  # for good: it may take the system minutes to try again
    dropped.begin(nsqd.listener)
    result = sender.publish_nowait("t", b"x")
    gevent.sleep(seconds)  # sleep: how long packets get lost
    dropped.end(nsqd.listener)
    assert result.get(timeout=60) == b"OK"
    assert sender.publish("t", b"after") == b"OK"
    assert (nsqd.bodies, len(nsqd.peers)) == ([b"before", b"x", b"after"], 2)
    assert sender.stats()["stalled"] == []


@on_linux
def test_so_is_one_whose_reply_got_lost(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    """Nothing of ours has to be sent again then: we send something that needs no reply."""
    dropped = DroppedPackets()

    def lose_the_first(peer: Peer, command: Command) -> None:
        if peer is nsqd.peers[0]:
            dropped.begin(peer.sock)
        else:
            peer.ok()

    nsqd: PublishNsqd = publish_nsqd(lose_the_first)
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER)
    assert sender.publish_nowait("t", b"x").get(timeout=60) == b"OK"
    assert (nsqd.bodies, len(nsqd.peers)) == ([b"x", b"x"], 2)


def test_a_server_that_is_slow_is_not_given_up(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer_late(peer: Peer, command: Command) -> None:
        gevent.sleep(4.0)  # sleep: the system has told lost packets by then
        peer.ok()

    nsqd = publish_nsqd(answer_late)
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER)
    assert sender.publish("t", b"x") == b"OK"
    assert (nsqd.bodies, len(nsqd.peers)) == ([b"x"], 1)


@on_linux
def test_what_nobody_acknowledges_for_write_timeout_ends_the_connection(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    nsqd, dropped = publish_nsqd(), DroppedPackets()
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER, write_timeout=1.0, connect_timeout=1.0)
    assert sender.publish("t", b"before") == b"OK"
    dropped.begin(nsqd.peers[0].sock)
    dropped.begin(nsqd.listener)
    sender.publish_nowait("t", b"x")
    until(lambda: sender.stats()["disconnected"])
    assert not sender.is_connected
