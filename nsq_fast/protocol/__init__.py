"""The protocol without I/O: no sockets, no clock, no gevent. What another client library embeds."""
