# cython: nonecheck=True
# What was not set, by mistake, is an AttributeError then, and does not end the process.

"""What each publish has, and what is done to the publishes of one command, compiled.

``nsq_fast.protocol.publishing`` says what the states of a publish are, and has what is done less often.
"""

# The body of an MPUB: the count of messages, then each message behind its length.
# nsqio/nsq: nsqd/protocol_v2.go, readMPUB.
COUNT_BYTES = COUNT_SIZE
LENGTH_BYTES = LENGTH_SIZE


cdef class PublishFields:
    """The attributes of ``nsq_fast.protocol.publishing.PublishState`` that all have.

    Attributes:
        is_plain: it says nothing but its body, or bodies.
    """

    def __init__(self, body, form, Py_ssize_t weight=1):
        self.fill(body, form, weight)

    cdef int fill(self, body, form, Py_ssize_t weight) except -1:
        self.body = body
        self.form = form
        self.weight = weight
        self.is_alone = form.is_alone
        self.is_plain = form.is_plain
        return 0

    cdef Py_ssize_t record_size(self) except -1:
        """Bytes that it adds to the MPUB that it shares with others."""
        return LENGTH_SIZE + len(self.body) + (0 if self.is_plain else self.form.overhead)


def sent(publishes, attempt):
    """``attempt`` carries these publishes now."""
    cdef PublishFields publish
    for publish in publishes:
        publish.attempt = attempt


def stored(publishes):
    """The server replied OK to these publishes; return those that end with it: some may have ended before."""
    cdef PublishFields publish
    cdef list ended = []
    for publish in publishes:
        if not publish.done:
            publish.done = True
            ended.append(publish)
    return ended


def take_command(waiting, Py_ssize_t most, Py_ssize_t enough, Py_ssize_t limit):
    """Take the publishes that leave as the next command from a queue: none, if all in it have ended.

    They are of one kind. Args:
        waiting: the queue, a deque.
        most: messages.
        enough: bytes of an MPUB body after which none is added.
        limit: bytes of an MPUB body that are not exceeded, but by a first message that is larger.
    """
    cdef PublishFields first, following
    cdef list taken
    cdef Py_ssize_t size
    # What ended while it waited, by its deadline say, stays in the queue until here: to look for it would cost more.
    while waiting:
        first = waiting.popleft()
        if not first.done:
            break
    else:
        return []
    taken = [first]
    if first.is_alone or not waiting or most == 1:
        return taken
    size = COUNT_SIZE + first.record_size()
    while waiting and len(taken) < most and size < enough:
        following = waiting[0]
        if not following.done:
            size += following.record_size()
            # MPUB is of one kind of record: a header or trace id cannot stand beside messages without one.
            if size > limit or following.is_alone or not _are_alike(first, following):
                break
            taken.append(following)
        waiting.popleft()
    return taken


cdef bint _are_alike(PublishFields one, PublishFields other) except -1:
    return one.form is other.form or one.form.kind == other.form.kind
