"""The open loop's other half: publish stamped messages at a rate, whatever becomes of them.

By a bare socket, which delays least; where the servers ask for TLS or AUTH, by a Producer.
"""

import socket
import struct
import time

from meter import STAMP_BYTES, client_options, seconds_until, settings, stamped, ticks

job = settings()
nsqd = tuple(job["nsqds"][0])
padding = b"x" * max(0, job["size"] - STAMP_BYTES)
head = struct.Struct(">ii")


def by_socket():
    sock = socket.create_connection(nsqd)
    sock.sendall(b"  V2")

    def publish(body, many):
        sized = struct.pack(">i", len(body)) + body
        sock.sendall(f"MPUB {job['topic']}\n".encode() + head.pack(4 + many * len(sized), many) + many * sized)
        reply = sock.recv(10, socket.MSG_WAITALL)
        if reply != head.pack(6, 0) + b"OK":
            raise SystemExit(f"nsqd answered {reply!r}")

    return publish


def by_producer(options):
    from nsq_fast import Producer

    producer = Producer([nsqd], **options)
    producer.start()
    return lambda body, many: producer.multipublish(job["topic"], [body] * many)


options = client_options()
publish = by_producer(options) if options else by_socket()
time.sleep(job["settle"])
for due, many in ticks(job["rate"], job["count"] + job["beyond"]):
    time.sleep(seconds_until(due))
    publish(stamped(due, padding), many)
