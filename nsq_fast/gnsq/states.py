"""Connection and consumer states."""

INIT = 0
CONNECTED = 1
DISCONNECTED = 2
RUNNING = 3
BACKOFF = 4
THROTTLED = 5
CLOSED = 6
