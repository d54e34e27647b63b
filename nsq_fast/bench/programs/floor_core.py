"""The floor at C speed: the compiled core on a bare blocking socket, and no client.

Consume: a Python handler, FINs gathered. Publish: a command, its reply, the next command.
"""

import socket
from time import time_ns

from meter import Meter, settings

from nsq_fast._codec import Message, fin_many, mpub, pub
from nsq_fast._frame import FrameReader

told = settings()
meter = Meter(told)
topic = told["topic"]
sock = socket.create_connection(tuple(told["nsqds"][0]))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
reader = FrameReader()
done = False


def handle(message, take=meter.take, marks=meter.marks):
    global done
    if take() in marks and meter.mark():
        done = True


def consume():
    sock.sendall(f"  V2SUB {topic} {told['channel']}\nRDY {told['max_in_flight']}\n".encode())
    while not done:
        messages = [item for item in reader.feed(sock.recv(65536)) if item.__class__ is Message]
        for message in messages:
            handle(message)
        if messages:
            sock.sendall(fin_many(messages))


def ask(command):
    sock.sendall(command)
    while not reader.feed(sock.recv(65536)):
        pass


def publish_mode(count):
    body = b"x" * told["size"]
    if told["mode"] == "batch":
        batch = [body] * told["batch"]
        for _ in range(count // told["batch"]):
            ask(mpub(topic, batch))
        return
    for _ in range(count):
        start = time_ns()
        ask(pub(topic, body))
        meter.seen(start)


def publish():
    sock.sendall(b"  V2")
    publish_mode(told["warmup"])
    meter.start()
    publish_mode(told["count"])
    meter.report(told["count"])


{"consume": consume, "publish": publish}[told["kind"]]()
