"""The floor: a bare socket loop that finds messages by struct and answers each read with its FINs."""

import socket
import struct

from meter import Meter, settings

told = settings()
meter = Meter(told["count"], told["warmup"])
sock = socket.create_connection(tuple(told["nsqd"]))
subscribe = f"SUB {told['topic']} {told['channel']}\nRDY {told['max_in_flight']}\n".encode()
sock.sendall(b"  V2" + subscribe)
header = struct.Struct(">ii")
buffer = b""
done = False
while not done:
    buffer += sock.recv(65536)
    at, fins = 0, []
    while len(buffer) - at >= 8:
        size, kind = header.unpack_from(buffer, at)
        if len(buffer) - at < 4 + size:
            break
        if kind == 2:
            fins.append(b"FIN " + buffer[at + 18 : at + 34] + b"\n")
            done = meter.tick() or done
        at += 4 + size
    buffer = buffer[at:]
    sock.sendall(b"".join(fins))
meter.report()
