# cython: nonecheck=True
# What was not set, by mistake, is an AttributeError then, and does not end the process.

"""What a producer does for each publish, compiled: it is queued, sent with a command, and ended by the reply to that.

The classes are the bases of those in ``nsq_fast.client``, which say what the rules are and have what is done less
often: ``PublishPath`` and ``LimitPath`` of ``publishes.Publish`` and ``PendingLimit``, ``PendingPath`` and
``SendPath`` of ``sender.Pending`` and ``Sender``, ``QueuePath`` of ``routing.Queue``, ``ProducerPath`` of
``producer.ProducerCore``.
"""

import sys
from collections import OrderedDict, deque

from cpython.contextvars cimport PyContext_Enter, PyContext_Exit
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pythread cimport PyThread_get_thread_ident
from libc.math cimport INFINITY

from ._client cimport ConnectionPath
from ._dispatch cimport monotonic

from ._codec import mpub, mpub_size, pub
from .errors import ConfigError, ConnectionLost, NsqError


# The body of an MPUB: the count of messages, then each message behind its length.
# nsqio/nsq: nsqd/protocol_v2.go, readMPUB.
COUNT_BYTES = COUNT_SIZE
LENGTH_BYTES = LENGTH_SIZE


cdef class Wakeups:
    """Wakes callers. What they wait for has an attribute ``waiter``; None: nobody waits any longer.

    With a hub that is a greenlet: those whose replies came in one read are resumed by one callback of the hub. Each
    hands on to the next when it waits again, without a switch to the hub between them: that is half the switches.
    Without a hub a task awaits its publish, and is resumed by one callback of the loop with the others: a future for
    each, and a callback for each future, would take a third of the time. Or it is a future, which gets the result.

    Attributes:
        is_waking: several are being resumed now: what they publish next can leave together.
    """

    def __init__(self, hub, getcurrent, loop):
        self._hub = hub
        self._getcurrent = getcurrent
        self.loop = hub.loop if hub is not None else loop
        self._call_soon = self.loop.run_callback if hub is not None else loop.call_soon
        self._ready = []
        self._due = []

    def add(self, awaited):
        """It has ended: have its caller go on soon."""
        self.add_all([awaited])

    cdef int add_all(self, list awaited) except -1:
        """As ``add``, for several."""
        cdef bint is_first = not self._ready
        if self._hub is not None:
            self._ready += awaited
        else:
            for each in awaited:
                if isinstance(each, PublishPath) and (<PublishPath>each).context is not None:
                    self._ready.append(each)
                else:
                    settle(each)
        if is_first and self._ready:
            self._call_soon(self._wake if self._hub is not None else self._resume)
        return 0

    def _wake(self):
        cdef list due = self._take_ready()
        while due:
            waiter = waiter_of(due.pop())
            if waiter is not None:  # None: it was interrupted meanwhile
                try:
                    waiter.switch()
                except BaseException as error:  # of a raw greenlet; it must not keep the others waiting
                    self._hub.handle_error(waiter, type(error), error, error.__traceback__)
        self.is_waking = False

    def _resume(self):
        """As ``_wake``, for tasks."""
        cdef list due = self._take_ready()
        cdef PublishPath publish
        try:
            while due:
                publish = due.pop()
                wake_up, publish.waiter = publish.waiter, None
                if wake_up is not None:
                    context, publish.context = publish.context, None
                    PyContext_Enter(context)
                    try:
                        wake_up(publish)
                    finally:
                        PyContext_Exit(context)
        finally:
            self.is_waking = False
            if due:  # what ends the program ends one task
                due.reverse()
                self._ready = due + self._ready
                self._call_soon(self._resume)

    cdef list _take_ready(self):
        cdef list due = self._ready
        self._ready = []
        self.is_waking = len(due) > 1
        due.reverse()
        self._due = due
        return due

    cdef object waiting_greenlet(self):
        """The calling greenlet; None for the hub, where nothing can wait."""
        current = self._getcurrent()
        return None if current is self._hub else current

    def wait_for(self, awaited):
        """Switch to whoever is to run next, until somebody resumes the calling greenlet, which waits for it."""
        self.wait_in(self._getcurrent(), awaited)

    cdef int wait_in(self, current, awaited) except -1:
        cdef list due = self._due
        awaited.waiter = current
        try:
            while due:
                waiter = waiter_of(due.pop())
                if waiter is not None:
                    waiter.switch()
                    return 0
            self._hub.switch()
        finally:
            awaited.waiter = None
        return 0


cdef int settle(awaited) except -1:
    """Give the future what a publish, or a group of them, has ended with; unless its task was cancelled."""
    future = waiter_of(awaited)
    if future is None or future.done():
        return 0
    if awaited.error is not None:
        future.set_exception(awaited.error)
    elif isinstance(awaited, PublishPath) and (<PublishPath>awaited).is_plain:
        future.set_result(b"OK")
    else:
        future.set_result(awaited.value())
    return 0


cdef object waiter_of(awaited):
    return (<PublishPath>awaited).waiter if isinstance(awaited, PublishPath) else awaited.waiter


cdef class PendingPath:
    """The publishes that have not ended.

    Attributes:
        publishes: they, as keys, in the order of the calls: those whose time is over together end in that order.
        rings_at: when deadlines are looked at next. ``hasten`` is called with a publish that has an earlier one.
        none_left: set when nothing is pending; None while nobody waits for that.
    """

    def __init__(self):
        self.publishes = {}
        self.rings_at = INFINITY

    cdef int put(self, PublishPath publish) except -1:
        """It is one of them."""
        self.publishes[publish] = None
        if publish.deadline < self.rings_at:
            self.hasten(publish)
        return 0


cdef class LimitPath:
    """How many messages a producer may hold, and holds.

    Attributes:
        limit: the most that may be held.
        used: those held now.
        queue: who waits for room, in order: each can leave at once, however many wait.
        admitted: how many were let in and are about to go on.
    """

    def __init__(self, Py_ssize_t limit):
        self.limit = limit
        self.queue = OrderedDict()

    cdef bint has_room(self, Py_ssize_t weight) except -1:
        """Whether so many may come in now, without a further look."""
        return self.used + weight <= self.limit and not self.admitted and not self.queue


cdef class PublishPath:
    """One publish: what all of them have. ``publishes.Publish`` says what its states are.

    Attributes:
        body: what is published, in the shape that ``encoding`` takes.
        encoding: what goes with it.
        weight: how many messages it is.
        destination: the queue that it goes through.
        deadline: when it has to be over, ``time.monotonic``.
        key: what its partition follows from; None where it has none.
        is_plain: it says nothing but its body, or bodies.
        is_alone: it shares its command with nobody.
        attempt: the command that carries it now; None while none does.
        done: it has ended, with ``error``, or well when that is None.
        waiter: the greenlet, or future, that waits for it; None while none does.
        promised: what gets its result, where nobody waits.
        group: what it is a part of.
        context: that of the task which awaits it. ``waiter`` is what wakes the task then.
    """

    def __init__(self, destination, body, double deadline, encoding, Py_ssize_t weight=1):
        self.body = body
        self.encoding = encoding
        self.weight = weight
        self.is_alone = encoding.is_alone
        self.is_plain = encoding.is_plain
        self.destination = destination
        self.deadline = deadline

    cdef Py_ssize_t record_size(self) except -1:
        """Bytes that it adds to the MPUB that it shares with others."""
        return LENGTH_SIZE + len(self.body) + (0 if self.is_plain else self.encoding.overhead)

    def wait(self, Wakeups wakeups not None):
        """Block the calling greenlet until it is done; return its value or raise its error."""
        return self.wait_in(wakeups._getcurrent(), wakeups)

    cdef object wait_in(self, current, Wakeups wakeups):
        if not self.done:
            # Of several that were woken together, each would keep the next one waiting.
            if not len(wakeups.loop._callbacks):
                self.read_soon(wakeups)
            while not self.done:  # whoever switches here without a reason does not end it
                wakeups.wait_in(current, self)
        if self.error is not None:
            raise self.error
        return b"OK" if self.is_plain else self.value()

    # What a task of asyncio asks of a future that it awaits

    def __await__(self):
        return self

    def __next__(self):
        if not self.done:
            self._asyncio_future_blocking = True
            return self
        if self.error is not None:
            raise self.error
        raise StopIteration

    def get_loop(self):
        """The loop of its producer: asyncio refuses to await it in another."""
        return self._wakeups().loop

    def add_done_callback(self, callback, *, context):
        """Have ``callback(self)`` resume the task that awaits it, in the task's context. One task does."""
        self.waiter = callback
        self.context = context

    def cancel(self, msg=None):
        """The task that awaits it is cancelled: resume it, with CancelledError. The publish itself goes on."""
        if self.done or self._cancelled is not None:
            return False
        from asyncio import CancelledError  # who has gevent alone need not load it

        self._cancelled = CancelledError() if msg is None else CancelledError(msg)
        self._wakeups().add_all([self])
        return True

    def result(self):
        """Asked by the task when it is resumed: raises the CancelledError, if there was one."""
        if self._cancelled is not None:
            raise self._cancelled

    cdef Wakeups _wakeups(self):
        return (<QueuePath?>self.destination).sender.wakeups

    cpdef bint read_soon(self, Wakeups wakeups) except -1:
        """Read the reply here if it comes in a moment: then the loop need not wake up for it. Whether it is done."""
        cdef ConnectionPath conn
        cdef bytes data
        # Of several that were woken together, each would keep the next one waiting.
        if self.attempt is not None and not wakeups.is_waking:
            conn = self.attempt.conn
            data = None if conn is None else conn.reply_soon()
            if data is not None:
                conn.take_reply(data)
        return self.done


cdef class Command:
    """One command on the wire, and the publishes that it carries: the token of its reply.

    Attributes:
        name: PUB, MPUB and so on; its sender sets it.
        partition: where it goes; None leaves that to the server.
        conn: the connection that owes the reply, which its sender sets; None once it is over.
        is_overdue: a publish in it ended before the reply came.
    """


cdef Command new_command(QueuePath queue, list publishes):
    """The command that carries these publishes of a queue. It is on its way from now on."""
    cdef Command command = Command.__new__(Command)
    command.destination = queue
    command.publishes = publishes
    command.partition = queue.partition
    queue.on_wire = command
    queue.in_flight += 1
    queue.is_idle = queue._is_pipelined
    return command


cdef class QueuePath:
    """Publishes on their way to one destination: they wait here, and leave.

    Attributes:
        sender: who sends for it.
        topic: the topic.
        links: the open links to those who take its publishes.
        waiting: publishes, in order; the next command is made of the first of them.
        held_bytes: size of what waits, while the queue is held to gather more; None while it is not held.
        partition: where the next command goes; None leaves that to the server.
        in_flight: commands on the wire, or whose publishes wait to be sent again.
        on_wire: the command that was sent last.
        is_idle: what is added now could leave at once, as far as that is for the queue to say.
        successor: names the queue that takes a publish now, or None when it is over; None while this one does.
        is_for_any_link: it does not matter which link takes a command; where there are several, ``choose`` says it.
    """

    def __init__(self, SendPath sender not None, topic, list links not None):
        self.sender = sender
        self.topic = topic
        self.links = links
        self.waiting = deque()
        self.is_idle = True
        self._is_pipelined = True

    def add(self, PublishPath publish not None):
        """Take a publish on its way: send it now, or when those before it have left."""
        cdef SendPath sender = self.sender
        if not self.is_idle or self.waiting:
            self._join(publish)
        # The publish of a caller that waits alone has nothing to be gathered with (nsq-fast bench publish).
        elif publish.is_alone or not sender.has_company() or not sender.hold(self):
            link = self._choose_link()
            if link is None:
                self.waiting.append(publish)
                sender.seek(self)
            else:
                sender.send(new_command(self, [publish]), link)
        else:
            self.held_bytes = 0
            self._join(publish)
        # Not before it is sent: the server works meanwhile.
        if not publish.done:
            sender.pending.put(publish)

    cdef int _join(self, PublishPath publish) except -1:
        """Add it to those that wait; they may leave now."""
        cdef SendPath sender = self.sender
        cdef Py_ssize_t held
        self.waiting.append(publish)
        if self.held_bytes is not None:
            held = <Py_ssize_t>self.held_bytes + publish.record_size()
            self.held_bytes = held
            if held >= sender.enough or len(self.waiting) >= sender.most or publish.is_alone:
                self.pump()
        elif self.successor is not None or (self.is_idle and self.links):
            self.pump()
        return 0

    def pump(self):
        """Send what can be sent."""
        if self.held_bytes is not None:
            self.held_bytes = None
            self.sender.release_hold(self)
        if self.successor is not None:
            self._hand_over(self.successor)
            return
        if self._is_pumping:
            return  # what is sent here may fail at once, and come back
        self._is_pumping = True
        try:
            while self.waiting and self.is_idle and self._send_next():
                pass
        finally:
            self._is_pumping = False

    cdef object _choose_link(self):
        return self.links[0] if self.is_for_any_link and len(self.links) == 1 else self.choose()

    cdef bint _send_next(self) except -1:
        cdef SendPath sender = self.sender
        cdef list publishes
        link = self._choose_link()
        if link is None:
            sender.seek(self)
            return False
        publishes = take_command(self.waiting, sender.most, sender.enough, sender.limit)
        if publishes:
            sender.send(new_command(self, publishes), link)
        return bool(publishes)

    def stored(self):
        """The server replied OK to a command."""
        self.in_flight -= 1


cpdef list take_command(waiting, Py_ssize_t most, Py_ssize_t enough, Py_ssize_t limit):
    """Take the publishes that leave as the next command from a queue: none, if all in it have ended.

    They are of one kind. Args:
        waiting: the queue, a deque.
        most: messages.
        enough: bytes of an MPUB body after which none is added.
        limit: bytes of an MPUB body that are not exceeded, but by a first message that is larger.
    """
    cdef PublishPath first, following
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


cdef bint _are_alike(PublishPath one, PublishPath other) except -1:
    return one.encoding is other.encoding or one.encoding.kind == other.encoding.kind


cdef class SendPath:
    """Sends commands, and takes their replies.

    Attributes:
        pending: publishes that somebody waits for.
        pending_limit: the share of ``max_pending`` that is taken.
        stored_count, refused_count, unknown_count: publishes that have ended, by outcome. One to several partitions is
            several.
        timed: called with the first publish of each command that was stored; None while nobody asked what they take.
        wakeups: wakes those who wait.
        lingers: a publish waits for others, whether or not there are any.
        most, enough, limit: of one command, see ``take_command``.
        heard: the signals that are heard, by their names.
    """

    cdef bint has_company(self) except -1:
        """Whether a publish has others to be gathered with."""
        return self.lingers or self.wakeups.is_waking or len(self.pending.publishes) > 0

    cdef int send(self, Command command, link) except -1:
        """Write a command; its end is reported to its destination, possibly before this returns."""
        cdef ConnectionPath conn = link.conn
        cdef PublishPath first = command.publishes[0]
        cdef QueuePath queue = command.destination
        cdef bint is_one = len(command.publishes) == 1
        command.conn = conn
        dialect = conn.session.dialect
        try:
            if command.partition is not None and not dialect.has_partitions:
                raise ConfigError(
                    f"partition={command.partition}: {dialect.name} servers have no partitions; leave it out"
                )
            if not is_one:
                command.name, data = self._encode_many(command, dialect)
            elif not first.is_plain:
                command.name, data = first.encoding.command(queue.topic, first.body, command.partition, dialect)
            elif type(first.body) is list:
                command.name, data = "MPUB", mpub(queue.topic, first.body, command.partition)
            else:
                command.name, data = "PUB", pub(queue.topic, first.body, command.partition)
            if command.name not in dialect.commands:
                dialect.require(command.name)
        except Exception as error:  # a ConfigError, and whatever else it may be: the queue waits for the command's end
            self.refused(conn, command, error)
            return 0
        try:
            self._write(command, data, link)
        except NsqError as error:
            if isinstance(error, ConnectionLost):
                link.drop(conn, error)
            self.refused(conn, command, error)
        except Exception as error:  # for want of memory, say: the next reply may be that of another command
            lost = ConnectionLost(f"{conn.address}: cannot send: {error!r}")
            lost.__cause__ = error
            link.drop(conn, lost)
            conn._stop(lost)
            self.refused(conn, command, error)
        return 0

    cdef int _write(self, Command command, bytes data, link) except -1:
        cdef ConnectionPath conn = link.conn
        cdef PublishPath first = command.publishes[0]
        # A caller that waits alone is about to give way: what the server waits for leaves at once.
        if len(command.publishes) == 1 and first.promised is None and not self.wakeups.is_waking:
            if conn.ask_if_idle(data, command.name, command):
                first.attempt = command
                return 0
        for publish in command.publishes:
            (<PublishPath?>publish).attempt = command
        conn.ask(data, command.name, command)
        return 0

    def replied(self, ConnectionPath conn not None, Command command not None, bytes data not None):
        """The server replied OK to a command."""
        cdef list publishes, ended = [], waiting = [], of_threads = []
        cdef PublishPath publish
        cdef LimitPath limit = self.pending_limit
        cdef PendingPath pending = self.pending
        if command.conn is not conn:
            self._replied_after_all(conn, command, data)
            return
        command.conn = None
        if data != b"OK":
            self._take_receipts(command, data, conn.address)
        if command.is_overdue:
            conn._owner.has_replied_late(conn)
        publishes = command.publishes
        command.publishes = []
        limit.used -= (<PublishPath?>publishes[0]).weight if len(publishes) == 1 else len(publishes)
        if limit.queue:
            limit.give(0)
        for publish in publishes:
            if not publish.done:  # some may have ended before
                publish.done = True
                ended.append(publish)
        self.stored_count += len(ended)
        if self.timed is not None and ended:
            self.timed(ended[0])
        for publish in ended:
            pending.publishes.pop(publish, None)
            if command.partition is not None and not publish.is_plain:
                publish.partition = command.partition
            if publish.waiter is not None:
                waiting.append(publish)
            elif isinstance(publish.promised, PlainPath):
                (<PlainPath>publish.promised).is_set = True
                of_threads.append(publish.promised)
                publish.promised = None
            elif publish.promised is not None or publish.group is not None:
                publish.wake(self.wakeups)
        if of_threads:
            (<PlainPath>of_threads[0]).producer.answered(of_threads)
        if waiting:  # not the caller that has read this reply itself: it waits no longer
            self.wakeups.add_all(waiting)
        if pending.none_left is not None:
            pending.removed()
        command.destination.stored()
        if "on_response" in self.heard:
            self.tell("on_response", response=data)


cdef class ProducerPath:
    """Publishes of one message with no headers, as bytes, and whatever key and trace id; all others are left to Python.
    """

    def _publish_usual(self, topic, body, key, partition, trace_id):
        """As ``publish``. None: it is not for this to do, and nothing was done."""
        cdef Wakeups wakeups = self._wakeups
        cdef PublishPath publish
        current = wakeups.waiting_greenlet()
        publish = None if current is None else self._prepared(topic, body, key, partition, trace_id)
        if publish is None:
            return None
        return self._end_of(publish, <QueuePath?>publish.destination, wakeups, current)

    def _sent_usual(self, topic, body, key, partition, trace_id):
        """A publish of a task of the producer's loop, on its way, or done. None: as above."""
        if not self._is_running or self._get_loop() is not self._home:
            return None
        return self._on_its_way(self._prepared(topic, body, key, partition, trace_id))

    def _sent_batch_usual(self, topic, bodies):
        """The same of a list that is one command."""
        if not self._is_running or self._get_loop() is not self._home:
            return None
        return self._on_its_way(self._prepared_batch(topic, bodies))

    cdef PublishPath _on_its_way(self, PublishPath publish):
        if publish is not None:
            (<QueuePath?>publish.destination).add(publish)
            # Of a single publish that is pending the reply comes soon: see SpinReader.
            if not publish.done and not len(self._ready):
                publish.read_soon(self._wakeups)
        return publish

    def _sent_for_thread(self, PlainPath request not None, set blocked not None):
        """Send what a thread waits for, and note it in ``blocked``; False: as above."""
        cdef PublishPath publish = self._prepared(request.topic, request.content, None, None, None)
        if publish is None:
            return False
        publish.promised = request
        request.parts = (publish,)
        blocked.add(request)
        (<QueuePath?>publish.destination).add(publish)
        return True

    def _multipublish_usual(self, topic, bodies):
        """As ``multipublish`` of a list that is one command. None: it is not for this to do, and nothing was done."""
        cdef Wakeups wakeups = self._wakeups
        cdef PublishPath publish
        current = wakeups.waiting_greenlet()
        publish = None if current is None else self._prepared_batch(topic, bodies)
        if publish is None:
            return None
        return self._end_of(publish, <QueuePath?>publish.destination, wakeups, current)

    cdef PublishPath _prepared_batch(self, topic, bodies):
        """As ``_prepared``, of a list that is one command."""
        cdef QueuePath queue
        cdef Py_ssize_t weight
        route = self._route_of(topic)
        if route is None or type(bodies) is not list or self._trace.is_active:
            return None
        queue, weight = route.any, len(bodies)
        if not weight or not self._pending_limit.has_room(weight):
            return None
        if not 0 < mpub_size(bodies, route.plain_size) <= queue.sender.limit:
            return None
        route.is_used = True
        return self._make(queue, (<list>bodies)[:], self._plain_batch, weight)

    def _prepared(self, topic, body, key, partition, trace_id):
        """A publish that has its room, and is not on its way yet. None: as above. Raises what is wrong with a trace id.
        """
        cdef Py_ssize_t size
        cdef PublishPath publish
        route = self._route_of(topic)
        if route is None or type(body) is not bytes or not self._pending_limit.has_room(1):
            return None
        size = len(<bytes>body)
        if size == 0 or size > <Py_ssize_t>route.plain_size:
            return None
        queue = route.any if key is None and partition is None else route.bound(key, partition)
        if queue is None:
            return None
        route.is_used = True
        encoding = self._plain
        if trace_id is not None or self._trace.is_active:
            encoding = self._composer.encoding(route, body, trace_id, None, None)
        publish = self._make(queue, body, encoding, 1)
        publish.key = key
        return publish

    cdef object _route_of(self, topic):
        """What is known of a topic; None where there is more to do than to send what is published to it."""
        if type(topic) is not str or not self._is_running:
            return None
        if <unsigned long>self._thread.ident != PyThread_get_thread_ident():
            return None
        return self._routes.get(topic)

    cdef PublishPath _make(self, queue, body, encoding, Py_ssize_t weight):
        self._pending_limit.used += weight
        return self._new_publish(queue, body, monotonic() + self._timeout, encoding, weight)

    cdef object _end_of(self, PublishPath publish, QueuePath queue, Wakeups wakeups, current):
        try:
            queue.add(publish)
            return publish.wait_in(current, wakeups)
        finally:
            if not publish.done:  # its caller was interrupted, or it could not be put in: its room is given back
                publish.destination.sender.abandon(publish)


# What a thread waits for until its publish has ended
#
# A thread that wakes up wants the interpreter's lock (GIL) next. While whoever wakes it has that, it falls asleep once
# more: sixteen threads that wait for their replies are woken sixteen times, and fall asleep and wake up again sixteen
# times for the lock. So they are woken together, after the lock was let go, and take turns: each offers its core to the
# others until the one that went before it waits again, and finds the interpreter's lock free then. Sixteen threads
# publish 1.7 times as many messages a second so (``nsq-fast bench suite --only publish-16``).

cdef extern from "Python.h" nogil:
    ctypedef long long PY_TIMEOUT_T
    ctypedef enum PyLockStatus:
        PY_LOCK_FAILURE
        PY_LOCK_ACQUIRED
        PY_LOCK_INTR
    PyThread_type_lock PyThread_allocate_lock()
    void PyThread_free_lock(PyThread_type_lock)
    int PyThread_acquire_lock(PyThread_type_lock, int waits)
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock, PY_TIMEOUT_T microseconds, int is_interruptible)
    void PyThread_release_lock(PyThread_type_lock)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    MOST_OFFERS = 20  # of a core, some 10 us: whoever has its turn for longer does something else than to publish

cdef bint has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # without it there is nothing to take turns for
cdef volatile bint is_turn_taken = False  # a hint: nothing but time is lost where it is wrong


cdef void take_turn() noexcept nogil:
    """Offer the core to the others that were woken together with this thread until none of them has its turn."""
    global is_turn_taken
    cdef int offers = 0
    while is_turn_taken and offers < MOST_OFFERS:
        sched_yield()
        offers += 1
    is_turn_taken = True


cdef class Latch:
    """Closed until somebody opens it, for good. Any thread may open it; one waits for it.

    Attributes:
        is_open: whether it was opened.
    """

    def __cinit__(self):
        self._lock = PyThread_allocate_lock()
        if self._lock is NULL:
            raise MemoryError("no lock is left for a thread to wait for")
        PyThread_acquire_lock(self._lock, 0)

    def __dealloc__(self):
        if self._lock is not NULL:
            if not self.is_open:
                PyThread_release_lock(self._lock)  # one that is taken must not be freed
            PyThread_free_lock(self._lock)

    def wait(self):
        """Block the thread until it is open. Signals are handled meanwhile."""
        global is_turn_taken
        cdef PyLockStatus status
        is_turn_taken = False
        while not self.is_open:
            with nogil:
                status = PyThread_acquire_lock_timed(self._lock, -1, 1)
                if self._is_one_of_many:
                    take_turn()
            if status == PY_LOCK_ACQUIRED:
                PyThread_release_lock(self._lock)  # it stays open
                return
            PyErr_CheckSignals()


cdef class PlainPath:
    """One body that a thread waits for, see ``threads.PlainRequest``.

    Attributes:
        latch: open when it has ended, with ``error`` or well.
    """

    def __init__(self, producer, topic, content):
        self.producer = producer
        self.topic = topic
        self.content = content
        self.parts = ()
        self.latch = Latch()

    def set(self, value):
        """It went well. There are no receipts without other arguments but in a trace, which is not plain."""
        self.is_set = True
        self.producer.answered([self])

    def set_exception(self, error):
        """It did not."""
        self.error = error
        self.is_set = True
        self.producer.answered([self])


def wake_all(list requests not None):
    """Open their latches. Their threads find the interpreter's lock free: the caller has it again after some of them.
    """
    cdef list latches = []  # nothing is freed before it is open
    cdef PyThread_type_lock* locks = <PyThread_type_lock*>PyMem_Malloc(
        max(1, len(requests)) * sizeof(PyThread_type_lock)
    )
    cdef Py_ssize_t count = 0, number
    cdef PlainPath request
    cdef Latch latch
    if locks is NULL:
        raise MemoryError("no memory is left to wake threads")
    try:
        for request in requests:
            latch = request.latch
            if not latch.is_open:
                latch.is_open = True
                locks[count] = latch._lock
                count += 1
                latches.append(latch)
        if count == 1:  # the caller lets go of the lock soon enough, and need not wait for it here
            PyThread_release_lock(locks[0])
        elif count:
            for latch in latches:
                latch._is_one_of_many = has_gil
            with nogil:
                for number in range(count):
                    PyThread_release_lock(locks[number])
    finally:
        PyMem_Free(locks)
