"""The floor in Python: a bare socket loop that finds messages by struct and sends the FINs of each read at once."""

import socket
import struct

from meter import Meter, settings

job = settings()
meter = Meter(job)
sock = socket.create_connection(tuple(job["nsqds"][0]))
sock.sendall(f"  V2SUB {job['topic']} {job['channel']}\nRDY {job['max_in_flight']}\n".encode())
header = struct.Struct(">ii")
take, marks = meter.take, meter.marks
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
            if take() in marks:
                done = meter.mark() or done
        at += 4 + size
    buffer = buffer[at:]
    sock.sendall(b"".join(fins))
