"""The open loop's other half: publish stamped messages at a rate, whatever becomes of them."""

import socket
import struct
import time

from meter import STAMP_BYTES, seconds_until, settings, stamped, ticks

job = settings()
padding = b"x" * max(0, job["size"] - STAMP_BYTES)
sock = socket.create_connection(tuple(job["nsqds"][0]))
sock.sendall(b"  V2")
time.sleep(job["settle"])
size = STAMP_BYTES + len(padding)
head = struct.Struct(">ii")
for due, many in ticks(job["rate"], job["count"] + job["beyond"]):
    time.sleep(seconds_until(due))
    body = struct.pack(">i", size) + stamped(due, padding)
    sock.sendall(f"MPUB {job['topic']}\n".encode() + head.pack(4 + many * len(body), many) + many * body)
    reply = sock.recv(10, socket.MSG_WAITALL)
    if reply != head.pack(6, 0) + b"OK":
        raise SystemExit(f"nsqd answered {reply!r}")
