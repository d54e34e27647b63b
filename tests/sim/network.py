"""A network of byte streams in memory: in order within a stream, in any order between streams, and faulty by order.

```
Socket (the client's)  <--- two directions, each with a delay and a capacity --->  Peer (a server's end)
```

A direction to or from a host can be cut: what is sent then arrives when it is mended, as TCP sends it again; if it is
not mended, nobody is told. A host can vanish: its streams are forgotten, and what comes for them is answered by a
reset, if the host is there again.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
from collections import deque
from collections.abc import Callable
from socket import SHUT_WR
from typing import Any

from .clock import SimError, SimLoop

FIRST_DESCRIPTOR = 1_000_000
"""No system has given out so many: a call that gets past the simulation fails."""

FIRST_REPEAT = 0.2
"""Seconds after which a system sends again what nobody has acknowledged."""

NSQD_PORT = 4150
TRY_INTERVAL = 0.999
"""Seconds between tries to connect to one nsqd that does not answer: docs/producer.md."""

CAPACITY = 200_000
"""Bytes that a direction holds: the send buffer of one system, and the receive buffer of the other."""


class End:
    """One end of a stream.

    Attributes:
        peer: the other end; None when it is gone for good.
        arrived: bytes that wait to be read.
        has_ended: the peer sends nothing more.
        reset: the error of which whoever uses it next is told.
        sock: of a client's end, what the client has.
        on_event: called when something has come, of a server's end.
    """

    def __init__(self, network: Network, host: Host, is_server: bool) -> None:
        self.network = network
        self.host = host
        self.is_server = is_server
        self.peer: End | None = None
        self.arrived = bytearray()
        self.has_ended = self.is_closed = self.is_write_ended = False
        self.is_known = True  # the system knows the stream; a host that has rebooted does not
        self.reset: int | None = None
        self.sock: Socket | None = None
        self.on_event: Callable[[], object] | None = None
        self.on_room: Callable[[], object] | None = None
        self.capacity = CAPACITY
        self.is_full = False  # what is sent here did not fit
        self.is_swallowing = False  # a middlebox has forgotten the stream: what is sent here goes nowhere
        self._in_flight = 0
        self._last_arrival = 0.0
        self._held: deque[tuple[Callable[..., object], Any]] = deque()
        self._held_since = 0.0

    # Sending

    @property
    def room(self) -> int:
        unread = len(self.peer.arrived) if self.peer is not None else 0
        return self.capacity - self._in_flight - unread

    def send(self, data: Any) -> int:
        """Take what there is room for; BlockingIOError for none."""
        self._check_usable()
        if self.is_write_ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        room = self.room
        self.is_full = len(data) >= room
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "no room")
        taken = bytes(data[:room])
        size = len(taken)
        self._in_flight += size
        chance = self.network.chance
        if size < 2 or chance.happens(0.8):
            self._post(self._arrive, taken)
            return size
        cuts = sorted({int(chance.random() * size) for _ in range(chance.randint(1, 3))} - {0})
        for start, end in zip([0, *cuts], [*cuts, size], strict=True):
            self._post(self._arrive, taken[start:end])
        return size

    def end_writing(self) -> None:
        self._check_usable()
        if not self.is_write_ended:
            self.is_write_ended = True
            self._post(self._arrive_end, None)

    def close(self, *, is_abrupt: bool = False) -> None:
        """As a system does when the last descriptor is closed: a reset, if something was not read."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.reset is not None:
            return
        if is_abrupt or self.arrived:
            self._post(self._arrive_reset, None)
        elif not self.is_write_ended:
            self.is_write_ended = True
            self._post(self._arrive_end, None)

    def vanish(self) -> None:
        """The host has lost all memory of the stream."""
        self.is_known = False
        self.is_closed = True
        self.arrived.clear()

    def _check_usable(self) -> None:
        if self.reset is not None:
            raise OSError(self.reset, os.strerror(self.reset))

    def _post(self, function: Callable[[Any], object], data: Any) -> None:
        """Have something arrive at the other end, after what was sent before."""
        if self.is_swallowing:
            return
        if self._held or self.host.is_cut(self.is_server):
            if not self._held:
                self._held_since = self.network.loop.time()
            self._held.append((function, data))
            self.host.note_held(self)
            return
        loop = self.network.loop
        # Never the same time twice: timers of the same time have no order.
        self._last_arrival = max(self._last_arrival + 2e-7, loop.time() + self.host.delay())
        loop.call_at(self._last_arrival, function, data)

    def times_sent_again(self) -> int:
        """How often a system has sent what is held since then: after 0.2 s, 0.4 s, 0.8 s..."""
        waited = self.network.loop.time() - self._held_since
        return int(math.log2(waited / FIRST_REPEAT + 1)) if self._held else 0

    def release(self) -> None:
        """The way is free again: TCP sends what was lost."""
        if self.host.is_slow_to_mend and not self.host.is_cut(self.is_server):
            next_time = self._held_since + FIRST_REPEAT * (2 ** (self.times_sent_again() + 1) - 1)
            self.network.loop.call_at(next_time, self._send_held)
        else:
            self._send_held()

    def _send_held(self) -> None:
        held, self._held = self._held, deque()
        for function, data in held:
            self._post(function, data)

    # What arrives at the other end

    def _arrive(self, data: bytes) -> None:
        self._in_flight -= len(data)
        peer = self.peer
        assert peer is not None
        if peer.is_closed or not peer.is_known:
            peer._post_reset_to(self)
        elif peer.reset is None:
            peer.arrived += data
            peer._tell()

    def _arrive_end(self, _: None) -> None:
        peer = self.peer
        assert peer is not None
        if not peer.is_known:
            peer._post_reset_to(self)
        else:
            peer.has_ended = True
            peer._tell()

    def _arrive_reset(self, _: None) -> None:
        peer = self.peer
        assert peer is not None
        if peer.is_closed or peer.reset is not None:
            return
        peer.reset = errno.ECONNRESET
        if self.network.chance.happens(0.5):
            self.network.lost += len(peer.arrived)  # what was not read yet may be lost with the stream
            peer.arrived.clear()
        peer._tell()

    def _post_reset_to(self, sender: End) -> None:
        if self.is_known or not self.host.is_down:
            self._post(self._arrive_reset, None)

    def stir(self) -> None:
        """Whoever waits for the client's socket is to look again."""
        if self.sock is not None:
            self.sock.stir()

    def _tell(self) -> None:
        self.stir()
        if self.on_event is not None:
            self.on_event()

    # Reading

    def take(self, size: int) -> bytes:
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        if data and self.peer is not None and self.peer.is_full:
            self.peer.has_room()
        return data

    def has_room(self) -> None:
        """What was sent here has been read."""
        self.is_full = self.room <= self.capacity // 3
        self.stir()
        if self.on_room is not None:
            self.network.loop.call_soon(self.on_room)

    def recv(self, size: int) -> bytes:
        if self.arrived:
            return self.take(size)
        self._check_usable()
        if self.has_ended:
            return b""
        raise BlockingIOError(errno.EAGAIN, "nothing there")

    @property
    def is_readable(self) -> bool:
        return bool(self.arrived) or self.has_ended or self.reset is not None


class Socket:
    """What the client has in place of a ``socket.socket``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._end: End | None = None
        self._error: int | None = None
        self._is_connecting = False
        self._descriptor = network.new_descriptor(self)

    def fileno(self) -> int:
        return self._descriptor

    def setblocking(self, is_blocking: bool) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def bind(self, address: Any) -> None: ...

    def getsockopt(self, *arguments: int) -> Any:
        if len(arguments) == 3:  # TCP_INFO
            return bytes((0, 0, 0 if self._end is None else self._end.times_sent_again()))
        error, self._error = self._error, None
        return error or 0

    def getsockname(self) -> tuple[str, int]:
        return ("10.0.0.1", self._descriptor % 50_000)

    def connect_ex(self, address: Any) -> int:
        self._is_connecting = True
        self._network.knock(self, (address[0], address[1]))
        return errno.EINPROGRESS

    def connected(self, end: End | None, error: int | None = None) -> None:
        self._is_connecting = False
        self._end, self._error = end, error
        if end is not None:
            end.sock = self
        self.stir()

    def stir(self) -> None:
        self._network.loop.stir(self._descriptor)

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    @property
    def is_connecting(self) -> bool:
        return self.is_open and self._is_connecting

    def readiness(self, wanted: int = selectors.EVENT_READ | selectors.EVENT_WRITE) -> int:
        """What a selector would say of it that was asked for that."""
        if self._is_connecting:
            return 0
        end = self._end
        if end is None or end.reset is not None:
            return wanted
        ready = selectors.EVENT_READ if end.is_readable else 0
        # as Linux does: a third of the buffer must be free
        if wanted & selectors.EVENT_WRITE and (end.room > end.capacity // 3 or end.is_write_ended):
            ready |= selectors.EVENT_WRITE
        return ready & wanted

    def _get(self) -> End:
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._end is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._end

    def recv(self, size: int, *_: Any) -> bytes:
        return self._get().recv(size)

    def send(self, data: Any, *_: Any) -> int:
        return self._get().send(data)

    def shutdown(self, how: int) -> None:
        assert how == SHUT_WR
        self._get().end_writing()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._network.closed(self._descriptor)
            self._descriptor = -1
            if self._end is not None:
                self._end.close()

    def detach(self) -> int:
        """Let go of it, as its loop is closed: nothing of it goes to anybody any more. It has no descriptor."""
        self._network.loop.sockets.pop(self._descriptor, None)
        self._descriptor = -1
        return -1


class Host:
    """A machine, or one side of a network: what happens to all streams to it.

    Attributes:
        name: its IP address.
        is_down: nothing comes from it, not even a reset.
        is_slow_to_mend: what was lost is sent again when a system would, after pauses that double, and not at once.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.is_down = self.is_slow_to_mend = False
        self.delays = (0.0001, 0.003)
        self._network = network
        self._cuts = {True: False, False: False}
        self._waiting: list[End] = []

    def delay(self) -> float:
        return self._network.chance.long_tailed(*self.delays)

    def is_cut(self, from_it: bool) -> bool:
        return self._cuts[from_it] or self.is_down

    def cut(self, *, to_it: bool = True, from_it: bool = True) -> None:
        """Lose all packets of these directions."""
        self._cuts[False] |= to_it
        self._cuts[True] |= from_it

    def mend(self) -> None:
        """All directions work again, and what was lost is sent once more."""
        self._cuts = {True: False, False: False}
        waiting, self._waiting = self._waiting, []
        for end in waiting:
            end.release()
        self._network.knock_again(self)

    def note_held(self, end: End) -> None:
        if end not in self._waiting:
            self._waiting.append(end)

    @property
    def is_well(self) -> bool:
        return not (self.is_down or self._cuts[True] or self._cuts[False])


class Network:
    """All hosts, and who listens there.

    Attributes:
        streams: both ends of every stream there was, the client's first.
        lost: bytes that had arrived, and were lost with a stream that was reset.
        links: most connections that the client may have to one nsqd; 0: how it tries to make them is not looked at.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.chance = loop.chance
        self.hosts: dict[str, Host] = {}
        self.streams: list[tuple[End, End]] = []
        self.lost = 0
        self.links = 0
        self._tries: dict[tuple[str, int], list[tuple[Socket, float]]] = {}  # and until when no other may begin
        self._listeners: dict[tuple[str, int], Callable[[End], object]] = {}
        self._knocking: list[tuple[Socket, tuple[str, int]]] = []

    def host(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = Host(self, name)
        return self.hosts[name]

    def listen(self, address: tuple[str, int], accept: Callable[[End], object]) -> None:
        self._listeners[address] = accept

    def deafen(self, address: tuple[str, int]) -> None:
        """Nobody listens there any more: who knocks is refused."""
        self._listeners.pop(address, None)

    # Descriptors, the lowest free one as systems do: whoever watches a closed one meets another's socket

    def new_socket(self, *_: Any) -> Socket:
        return Socket(self)

    def new_descriptor(self, sock: Socket) -> int:
        number = FIRST_DESCRIPTOR
        while number in self.loop.sockets:
            number += 1
        self.loop.sockets[number] = sock
        return number

    def closed(self, descriptor: int) -> None:
        if descriptor in (self.loop._selector.get_map() or {}):  # type: ignore[attr-defined]
            raise SimError("a socket was closed that the loop still watches")
        del self.loop.sockets[descriptor]

    # Connecting

    def knock(self, sock: Socket, address: tuple[str, int]) -> None:
        if self.links and address[1] == NSQD_PORT:
            self._count_try(sock, address)
        host = self.host(address[0])
        self.loop.call_later(2 * host.delay(), self._answer, sock, address)

    def _count_try(self, sock: Socket, address: tuple[str, int]) -> None:
        """An nsqd that does not answer is tried once a second for each connection to it."""
        now = self.loop.time()
        waiting = [each for each in self._tries.get(address, ()) if each[0].is_connecting and each[1] > now]
        text = f"{len(waiting)} tries to connect to {address[0]} began less than a second ago and wait for an answer"
        self.loop.books.require(len(waiting) < self.links, f"{text}, and another begins")
        self._tries[address] = [*waiting, (sock, now + TRY_INTERVAL)]

    def knock_again(self, host: Host) -> None:
        knocking, self._knocking = self._knocking, []
        for sock, address in knocking:
            if address[0] != host.name:
                self._knocking.append((sock, address))
            elif sock.is_open:  # SYN is sent again after a second, two, four
                self.loop.call_later(self.chance.random(), self._answer, sock, address)

    def _answer(self, sock: Socket, address: tuple[str, int]) -> None:
        if not sock.is_open:
            return
        host = self.host(address[0])
        if not host.is_well:
            self._knocking.append((sock, address))
            return
        accept = self._listeners.get(address)
        if accept is None:
            sock.connected(None, errno.ECONNREFUSED)
            return
        ours, theirs = End(self, host, False), End(self, host, True)
        ours.peer, theirs.peer = theirs, ours
        self.streams.append((ours, theirs))
        sock.connected(ours)
        accept(theirs)
