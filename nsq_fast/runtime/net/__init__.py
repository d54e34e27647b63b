"""One connection: bytes, layers, frames, answers; and HTTP on the same sockets."""
