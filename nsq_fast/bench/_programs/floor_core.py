"""The floors at C speed: the compiled core on bare blocking sockets, and no client.

Consume: a Python handler, FINs gathered; epoll says which of several sockets has something. Publish: a command, its
reply, the next command. TLS and compression: the same transformation of bytes, and nothing else. Ordered: a message,
its FIN, the next message. Roundtrip: what is due at a time as one MPUB, and what has come of it. Start: what has to be
imported for that, one lookup, one message.

Variants: ``batches`` gives the handler all that one read brought; ``ready bytes`` writes one MPUB that was made before;
``pipelined`` has as many PUBs on their way as there are callers; ``Python`` finds the messages by struct.
"""

# ruff: noqa: E402  (what the imports take is measured, so the core comes before those that import the same)

from time import perf_counter, process_time

BEFORE_IMPORT = process_time()
import socket

from nsq_fast._codec import Message, fin_many, mpub, pub, sub_ordered
from nsq_fast._frame import FrameReader

IMPORT_SECONDS = process_time() - BEFORE_IMPORT

import json
import select
import ssl
import struct
import zlib
from http.client import HTTPConnection
from time import time_ns

from meter import STAMP_BYTES, Alarm, Meter, settings, stamp_of, stamped, ticks

job = settings()
meter = Meter(job)
topic = job["topic"]
done = False


def handle(message, take=meter.take, marks=meter.marks):
    global done
    if take() in marks and meter.mark():
        done = True


def handle_batch(messages, take=meter.take, marks=meter.marks):
    global done
    for _ in messages:
        if take() in marks and meter.mark():
            done = True


def timed(plain):
    """A handler that notes the latency of a stamped message before ``plain`` counts it."""

    def note(message):
        meter.seen(stamp_of(message.body))
        plain(message)

    return note


class Plain:
    """Bytes as they are; over TLS too, where the socket transforms them."""

    def __init__(self, sock):
        self.sock = sock
        self.send = sock.sendall

    def receive(self):
        data = self.sock.recv(65536)
        if not data:
            raise SystemExit("the server closed the connection")
        return (data,)


class Deflated:
    def __init__(self, sock):
        self.sock = sock
        self.compressor = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        self.decompress = zlib.decompressobj(-zlib.MAX_WBITS).decompress

    def send(self, data):
        self.sock.sendall(self.compressor.compress(data) + self.compressor.flush(zlib.Z_SYNC_FLUSH))

    def receive(self):
        return (self.decompress(self.sock.recv(65536)),)


class Snappy:
    """The framing format: a type, three bytes of length, a chunk; only whole chunks are decompressed."""

    def __init__(self, sock):
        import snappy

        self.sock = sock
        self.compress = snappy.StreamCompressor().compress
        self.decompress = snappy.StreamDecompressor().decompress
        self.rest = b""

    def send(self, data):
        self.sock.sendall(self.compress(data))

    def receive(self):
        data, end = self.rest + self.sock.recv(65536), 0
        while len(data) - end >= 4 and end + (size := 4 + int.from_bytes(data[end + 1 : end + 4], "little")) <= len(
            data
        ):
            end += size
        self.rest = data[end:]
        return (self.decompress(data[:end]),) if end else ()


class Link:
    def __init__(self, address):
        self.sock = socket.create_connection(tuple(address))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = FrameReader()
        self.sock.sendall(b"  V2")
        self.wire = Plain(self.sock)
        if job["tls"] or job["compression"] or job["unbuffered"]:
            self.negotiate()

    def negotiate(self):
        wanted = {"feature_negotiation": True, "tls_v1": job["tls"]}
        if job["compression"]:
            wanted[job["compression"]] = True
        if job["unbuffered"]:
            wanted["output_buffer_size"] = -1
        body = json.dumps(wanted).encode()
        self.sock.sendall(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        (size,) = struct.unpack(">i", self.sock.recv(4, socket.MSG_WAITALL))
        self.sock.recv(size, socket.MSG_WAITALL)
        if job["tls"]:
            context = ssl.create_default_context(cafile=job["cafile"])
            self.sock = context.wrap_socket(self.sock, server_hostname="127.0.0.1")
            self.wire = Plain(self.sock)
            self.expect_reply()
        if job["compression"]:
            self.wire = {"snappy": Snappy, "deflate": Deflated}[job["compression"]](self.sock)
            self.expect_reply()

    def expect_reply(self):
        while not self.read():
            pass

    def read(self):
        """What the next bytes bring, often nothing: only half of a message."""
        items = []
        for piece in self.wire.receive():
            items += self.reader.feed(piece)
        return items

    def subscribe(self, rdy):
        self.wire.send(f"SUB {topic} {job['channel']}\nRDY {rdy}\n".encode())

    def serve(self):
        messages = [item for item in self.read() if item.__class__ is Message]
        for message in messages:
            handle(message)
        if messages:
            self.wire.send(fin_many(messages))
        return len(messages)

    def serve_batch(self):
        messages = [item for item in self.read() if item.__class__ is Message]
        if messages:
            handle_batch(messages)
            self.wire.send(fin_many(messages))

    def ask(self, command):
        self.wire.send(command)
        self.expect_reply()


def consume():
    links = [Link(address) for address in job["nsqds"]]
    for link in links:
        link.subscribe(job["max_in_flight"] // len(links))
    if len(links) == 1:
        serve = links[0].serve_batch if job["variant"] == "batches" else links[0].serve
        while not done:
            serve()
        return
    poll = select.epoll()
    by_descriptor = {link.sock.fileno(): link for link in links}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    while not done:
        for descriptor, _ in poll.poll():
            by_descriptor[descriptor].serve()


def consume_in_python():
    link = Link(job["nsqds"][0])
    link.subscribe(job["max_in_flight"])
    header, buffer = struct.Struct(">ii"), b""
    while not done:
        buffer += link.sock.recv(65536)
        at, fins = 0, []
        while len(buffer) - at >= 8:
            size, kind = header.unpack_from(buffer, at)
            if len(buffer) - at < 4 + size:
                break
            if kind == 2:
                handle(None)
                fins.append(b"FIN " + buffer[at + 18 : at + 34] + b"\n")
            at += 4 + size
        buffer = buffer[at:]
        link.sock.sendall(b"".join(fins))


def ordered():
    """One partition of a cluster: the node that leads it is the one that takes the subscription."""
    for address in job["nsqds"]:
        link = Link(address)
        link.wire.send(sub_ordered(topic, job["channel"], 0))
        while not (reply := link.read()):
            pass
        if getattr(reply[0], "data", b"OK") == b"OK":
            break
    else:
        raise SystemExit("no node leads the partition")
    link.wire.send(b"RDY 1\n")
    while not done:
        for item in link.read():
            if item.__class__ is Message:
                link.wire.send(fin_many([item]))
                handle(item)


def publish_mode(link, count):
    body = b"x" * job["size"]
    if job["rate"]:
        alarm = Alarm()
        for due, many in ticks(job["rate"], count):
            alarm.set(due)
            select.select([alarm.descriptor], [], [])
            alarm.clear()
            link.ask(mpub(topic, [body] * many))
            for _ in range(many):
                meter.seen(due)
        return
    if job["mode"] == "batch":
        batch = [body] * job["batch"]
        ready = mpub(topic, batch) if job["variant"] == "ready bytes" else None
        for _ in range(count // job["batch"]):
            link.ask(ready or mpub(topic, batch))
        return
    if job["mode"] == "concurrent":
        pipeline(link, body, count)
        return
    for _ in range(count):
        start = time_ns()
        link.ask(pub(topic, body))
        meter.seen(start)


def pipeline(link, body, count):
    """As many on their way as there are callers: what one read replies to is followed by as many."""
    left, many, replied = count, min(count, job["concurrency"]), 0
    while replied < count:
        if many:
            link.wire.send(b"".join([pub(topic, body) for _ in range(many)]))
            left -= many
        many = len(link.read())
        replied += many
        many = min(many, left)


def publish():
    link = Link(job["nsqds"][0])
    publish_mode(link, job["warmup"])
    meter.start()
    publish_mode(link, job["count"])
    meter.report(job["count"])


def roundtrip():
    """At a rate, or with as many messages under way as the job says."""
    publisher, consumer = Link(job["nsqds"][0]), Link(job["nsqds"][0])
    consumer.subscribe(job["max_in_flight"])
    padding = b"x" * max(0, job["size"] - STAMP_BYTES)

    def send(due, many):
        publisher.wire.send(mpub(topic, [stamped(due, padding)] * many))

    poll = select.epoll()
    poll.register(publisher.sock, select.EPOLLIN)
    poll.register(consumer.sock, select.EPOLLIN)
    alarm, times = Alarm(), iter(())
    poll.register(alarm.descriptor, select.EPOLLIN)
    if job["rate"]:
        times = ticks(job["rate"], job["count"] + job["beyond"])
    else:
        send(time_ns(), job["concurrency"])
    due = next(times, None)
    while not done:
        if due:
            alarm.set(due[0])
        for descriptor, _ in poll.poll():
            if descriptor == alarm.descriptor:
                alarm.clear()
                send(*due)
                due = next(times, None)
            elif descriptor == publisher.sock.fileno():
                publisher.read()
            else:
                served = consumer.serve()
                while job["tls"] and consumer.sock.pending():
                    served += consumer.serve()
                if served and not job["rate"]:
                    send(time_ns(), served)


def start():
    """The least that a program can do for its first message: a lookup, a connection, a subscription."""
    meter.start()
    began = perf_counter()
    lookup = HTTPConnection(job["lookupds"][0].removeprefix("http://"))
    lookup.request("GET", f"/lookup?topic={topic}")
    found = json.loads(lookup.getresponse().read())["producers"][0]
    link = Link((found["broadcast_address"], found["tcp_port"]))
    link.subscribe(1)
    while not any(item.__class__ is Message for item in link.read()):
        pass
    first = perf_counter() - began
    meter.report(1, import_ms=IMPORT_SECONDS * 1e3, first_ms=first * 1e3)


if job["kind"] == "roundtrip" or (job["kind"] == "consume" and job["rate"]):
    handle = timed(handle)
KINDS = {"consume": consume, "publish": publish, "roundtrip": roundtrip, "ordered": ordered, "start": start}
consume_in_python() if job["variant"] == "Python" else KINDS[job["kind"]]()
