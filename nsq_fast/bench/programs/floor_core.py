"""The floor at C speed: the compiled core on bare blocking sockets, and no client.

Consume: a Python handler, FINs gathered; epoll says which of several sockets has something. Publish: a command, its
reply, the next command.
"""

import select
import socket
from time import time_ns

from meter import Meter, settings

from nsq_fast._codec import Message, fin_many, mpub, pub
from nsq_fast._frame import FrameReader

job = settings()
meter = Meter(job)
topic = job["topic"]
done = False


def handle(message, take=meter.take, marks=meter.marks):
    global done
    if take() in marks and meter.mark():
        done = True


class Link:
    def __init__(self, address):
        self.sock = socket.create_connection(tuple(address))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = FrameReader()

    def subscribe(self, rdy):
        self.sock.sendall(f"  V2SUB {topic} {job['channel']}\nRDY {rdy}\n".encode())

    def serve(self):
        messages = [item for item in self.reader.feed(self.sock.recv(65536)) if item.__class__ is Message]
        for message in messages:
            handle(message)
        if messages:
            self.sock.sendall(fin_many(messages))

    def ask(self, command):
        self.sock.sendall(command)
        while not self.reader.feed(self.sock.recv(65536)):
            pass


def consume():
    links = [Link(address) for address in job["nsqds"]]
    for link in links:
        link.subscribe(job["max_in_flight"] // len(links))
    if len(links) == 1:
        while not done:
            links[0].serve()
        return
    poll = select.epoll()
    by_descriptor = {link.sock.fileno(): link for link in links}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    while not done:
        for descriptor, _ in poll.poll():
            by_descriptor[descriptor].serve()


def publish_mode(link, count):
    body = b"x" * job["size"]
    if job["mode"] == "batch":
        batch = [body] * job["batch"]
        for _ in range(count // job["batch"]):
            link.ask(mpub(topic, batch))
        return
    for _ in range(count):
        start = time_ns()
        link.ask(pub(topic, body))
        meter.seen(start)


def publish():
    link = Link(job["nsqds"][0])
    link.sock.sendall(b"  V2")
    publish_mode(link, job["warmup"])
    meter.start()
    publish_mode(link, job["count"])
    meter.report(job["count"])


{"consume": consume, "publish": publish}[job["kind"]]()
