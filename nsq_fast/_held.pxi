"""The messages of a connection that were received and not answered. Part of ``_codec``, which includes this file.

They are in one list, in order of arrival. Answers mostly come in the same order: these are found at the front, where
nothing of a message is looked at but its address, and leave the list at once. Messages that were answered in another
order are dropped many at a time.
"""

from libc.math cimport INFINITY

cdef enum:
    SLACK = 16          # answered messages that may stay, beside as many as are in flight
    TRIM_AT = 1024      # places at the front of the list that are empty before the list is made shorter


cdef class HeldMessages:
    """Counts messages in flight, and knows which they are; what ``nsq_fast.protocol.session`` is built on.

    ``count`` messages are in flight; an answer that is given twice counts twice. ``late`` messages have expired and may
    still be answered; their answers do not count. ``next_deadline`` is when the first to come expires, or earlier, by
    ``msg_timeout``, in seconds; infinite before there is one.
    """

    cdef public Py_ssize_t count
    cdef public Py_ssize_t late
    cdef public double msg_timeout
    cdef public double next_deadline
    cdef list _messages
    cdef Py_ssize_t _at     # the places before this are None

    def __cinit__(self):
        self._messages = []
        self.next_deadline = INFINITY

    @cython.critical_section
    def __len__(self):
        """Messages that are held, answered ones among them."""
        return PyList_GET_SIZE(self._messages) - self._at

    @cython.critical_section
    def received(self, list messages not None):
        """These messages have arrived, all at the same time. Returns how many are in flight now."""
        _check_messages(messages)
        if self.next_deadline == INFINITY and PyList_GET_SIZE(messages):
            self.next_deadline = (<Message> messages[0]).received_at + self.msg_timeout
        self.count += PyList_GET_SIZE(messages)
        self._messages += messages
        if PyList_GET_SIZE(self._messages) - self._at > 2 * self.count + SLACK:
            self._drop_answered()
        return self.count

    @cython.critical_section
    def follow(self, Message message not None):
        """A message stands for another, which is counted already and marked as responded."""
        self._messages.append(message)

    def finish(self, messages):
        """FIN of these messages, as one buffer; they are marked as responded, and in flight no more."""
        cdef list items = messages if type(messages) is list else _listed(messages, "messages")
        cdef bytes data
        with cython.critical_section(self, items):
            data = _fin_each(items)
            self._answered(items)
        return data

    def answered(self, messages):
        """FIN or REQ of these messages is about to be sent; they are marked as responded."""
        cdef list items = messages if type(messages) is list else list(messages)
        with cython.critical_section(self, items):
            self._answered(items)

    cdef int _answered(self, list items) except -1:
        cdef list held = self._messages
        cdef Py_ssize_t count = PyList_GET_SIZE(items), size = PyList_GET_SIZE(held), at = self._at, i = 0, late
        if self.late:
            late = _expired(items)
            self.late = max(0, self.late - late)
            self.count = max(0, self.count - (count - late))
        else:
            # More than are in flight: an embedder may answer a message twice, and nsqd refuses the second answer.
            self.count = self.count - count if self.count > count else 0
        while i < count and at + i < size and PyList_GET_ITEM(held, at + i) == PyList_GET_ITEM(items, i):
            i += 1
        if at + i == size:
            held.clear()
            self._at = 0
            return 0
        self._at = at + i
        # The places stay, and let go of their messages: bodies must not live for as long as the list is not trimmed.
        for i in range(at, self._at):
            held[i] = None
        if self._at > TRIM_AT and 2 * self._at > size:
            del held[:self._at]
            self._at = 0
        return 0

    @cython.critical_section
    def unanswered(self):
        """Drop what is answered or expired; return the others, in order of arrival."""
        self._drop_answered()
        return self._messages[:]

    cdef int _drop_answered(self) except -1:
        self._messages = unanswered(self._messages[self._at:])
        self._at = 0
        return 0

    @cython.critical_section
    def keep(self, list messages not None):
        """Hold these, and nothing else; what is counted stays as it is."""
        _check_messages(messages)
        self._messages = messages[:]
        self._at = 0

    @cython.critical_section
    def unreachable(self, dict noted=None, list others=None):
        """Messages that only this list refers to: nobody can answer them any more.

        Being a key of ``noted`` is no reference of a program's either. ``others`` are looked at, too: messages that are
        held no longer.
        """
        cdef list found
        self._drop_answered()
        found = _unreachable(self._messages, noted)
        if others is not None:
            found = _unreachable(others, noted) + found
        return found


cdef list _unreachable(list messages, dict noted):
    cdef list found = []
    cdef PyObject* message
    cdef Py_ssize_t i, references
    for i in range(PyList_GET_SIZE(messages)):
        message = PyList_GET_ITEM(messages, i)
        references = Py_REFCNT(message)  # before anything else refers to it
        if references > 2:
            continue
        if references - (1 if noted and <object> message in noted else 0) == 1:
            found.append(<object> message)
    return found


cdef int _check_messages(list messages) except -1:
    # Whatever is held is taken for a Message from then on; an embedder's list may hold anything.
    cdef Py_ssize_t i
    for i in range(PyList_GET_SIZE(messages)):
        if not isinstance(<object> PyList_GET_ITEM(messages, i), Message):
            raise TypeError(f"messages must hold Message, not {type(<object> PyList_GET_ITEM(messages, i)).__name__}")
    return 0


cdef Py_ssize_t _expired(list items) except -1:
    cdef Py_ssize_t count = 0
    for each in items:
        if isinstance(each, Message) and load_flags(&(<Message> each)._flags) & EXPIRED:
            count += 1
    return count


cdef list unanswered(list messages):
    cdef list left = []
    cdef Message message
    for message in messages:
        if not load_flags(&message._flags) & (RESPONDED | EXPIRED):
            left.append(message)
    return left
