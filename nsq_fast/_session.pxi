# What a session does for each command and for each read: replies find their commands, bytes become messages.
# ``SessionPath`` is the base of ``nsq_fast.protocol.session``, which says what the rules are and has what is done less
# often. No I/O, and no clock.

cdef enum:
    OK_SIZE = 10
    RECEIPT_SIZE = 38  # a frame with the answer to a traced publish, see ``_codec.traced_reply``


@cython.nonecheck(True)  # what was not set, by mistake, is an AttributeError then, and does not end the process
cdef class SessionPath:
    """The side of a conversation that all connections need all the time.

    Args:
        stage: how far the conversation has come.
        ready: the stage in which commands are allowed, and messages come.
        publishes: the names of the commands to which OK says all there is to say.
        reader: makes frames of what is received until another takes its place.

    Attributes:
        stage: how far the conversation has come.
        dialect: the server's family; its ``commands`` are those that the server knows.
        pending: the commands that wait for their reply: name and token, in the order in which they were given.
        message_count: messages in the list that ``receive`` returned last. When it equals the length of the list, the
            list holds messages only.
        failure: the error that the next ``receive`` raises, if there is one.
        ledger: the messages in flight, and when the server takes them back.
    """

    def __init__(self, stage, ready, publishes, FrameReader reader not None):
        self.stage = stage
        self.pending = deque()
        self._ready = ready
        self._publishes = publishes
        self._reader = reader

    def expect(self, command, token=None):
        """Register a command whose bytes the caller has built; its reply will carry ``token``.

        The bytes must be written in the order of the ``expect`` calls. Raises LocalProtocolError
        when no command is allowed now, or when the server's dialect does not have it.
        """
        self.put(command, token)

    cdef int put(self, command, token) except -1:
        if self.stage is not self._ready or command not in self.dialect.commands:
            self._refuse(command)
        self.pending.append((command, token))
        return 0

    cdef bint is_ready(self) noexcept:
        """Whether commands are allowed, and nothing read so far ends the connection."""
        return self.stage is self._ready and self.failure is None

    cdef bint is_idle(self) except -1:
        """Whether commands are allowed, and no reply is due."""
        return self.is_ready() and not self.pending

    def receive(self, data, double now=0.0):
        """Take bytes from the server; return what they complete: messages and events, in order.

        Args:
            data: what was read; ``b""`` for the end of the stream.
            now: a monotonic time in seconds. It becomes ``received_at`` of the messages, and is needed to notice a
                server that ignores RDY.

        Raises:
            RemoteProtocolError: the server broke the protocol, or sends many more messages than RDY allows.
            LocalProtocolError: called before ``connect()``, or between UpgradeNeeded and ``upgraded()``.
        """
        return self.take(data, now)

    cdef list take(self, data, double now):
        cdef FrameReader reader = self._reader
        cdef list frames
        cdef Py_ssize_t in_flight
        if not data or not self.is_ready():
            return self._receive_otherwise(data, now)
        frames = reader.feed(data, now)
        self.message_count = reader.message_count
        self.failure = reader._error  # behind frames that were whole, which are returned first
        if self.message_count < len(frames):
            return self._mixed(frames, now)
        if frames:
            in_flight = self.ledger.received(frames)
            if in_flight > <double>self._limit.most:
                self.check_in_flight(in_flight, now)
        return frames

    def receive_oks(self, data):
        """Take the usual answers to publishes, and return their tokens: ``data`` is OKs, one or more, and nothing else.

        Otherwise returns None, and nothing happened: ``receive`` takes everything.
        """
        return self.take_oks(data)

    cdef list take_oks(self, data):
        cdef bytes taken
        cdef Py_ssize_t count
        # Bytes of a partial frame before them would make it something else; a failure has to be raised first.
        if not self.pending or not self.is_ready() or self._reader.buffered:
            return None
        taken = data if type(data) is bytes else bytes(data)
        count = count_oks(taken)
        if count == 1:  # as for a publisher that waits for each
            return [self.pending.popleft()[1]] if self.pending[0][0] in self._publishes else None
        return self._tokens(count) if 0 < count <= len(self.pending) else None

    cdef object take_receipt(self, bytes data):
        """As ``take_oks``, of what was stored of one traced publish: the token of that, or None."""
        if not self.pending or not self.is_ready() or self._reader.buffered:
            return None
        if self.pending[0][0] not in self._publishes or PyBytes_GET_SIZE(data) != RECEIPT_SIZE:
            return None
        if memcmp(PyBytes_AS_STRING(data), <const char*> b"\0\0\0\x22\0\0\0\0OK", OK_SIZE):
            return None
        return self.pending.popleft()[1]

    cdef list _tokens(self, Py_ssize_t count):
        """Take out the tokens of the next publishes; None if not all of the next commands are publishes."""
        cdef list tokens = []
        for command, token in self.pending:
            if command not in self._publishes:
                return None
            tokens.append(token)
            if len(tokens) == count:
                break
        for _ in tokens:
            self.pending.popleft()
        return tokens


cdef Py_ssize_t count_oks(bytes data) except -1:
    """How many frames that say OK these bytes are; 0 if they are anything else."""
    cdef const char* start = PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at
    if size % OK_SIZE:
        return 0
    for at in range(0, size, OK_SIZE):
        if memcmp(start + at, <const char*> b"\0\0\0\x06\0\0\0\0OK", OK_SIZE):  # size, type, data
            return 0
    return size // OK_SIZE
