"""The gevent runtime: the only layer that owns sockets, clocks and greenlets."""
