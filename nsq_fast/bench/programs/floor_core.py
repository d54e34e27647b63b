"""The floor at C speed: the compiled reader on a bare blocking socket, a Python handler, FINs gathered; no client."""

import socket

from meter import Meter, settings

from nsq_fast._codec import Message, fin_many
from nsq_fast._frame import FrameReader

told = settings()
meter = Meter(told)
sock = socket.create_connection(tuple(told["nsqds"][0]))
sock.sendall(f"  V2SUB {told['topic']} {told['channel']}\nRDY {told['max_in_flight']}\n".encode())
reader = FrameReader()
done = False


def handle(message, take=meter.take, marks=meter.marks):
    global done
    if take() in marks and meter.mark():
        done = True


while not done:
    messages = [item for item in reader.feed(sock.recv(65536)) if item.__class__ is Message]
    for message in messages:
        handle(message)
    if messages:
        sock.sendall(fin_many(messages))
