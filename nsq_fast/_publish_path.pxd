"""What a producer does for each publish; see the .pyx."""

from ._client cimport ConnectionPath

cdef enum:
    COUNT_SIZE = 4
    LENGTH_SIZE = 4


cdef extern from "Python.h" nogil:
    ctypedef void* PyThread_type_lock


cdef class Wakeups:
    cdef object _hub
    cdef object _getcurrent
    cdef object _call_soon
    cdef readonly object loop
    cdef list _ready
    cdef list _due              # being resumed, the next one last
    cdef public bint is_waking

    cdef int add_all(self, list awaited) except -1
    cdef object waiting_greenlet(self)
    cdef int wait_in(self, current, awaited) except -1
    cdef list _take_ready(self)


cdef class Command
cdef class PublishPath


cdef class PendingPath:
    cdef readonly dict publishes
    cdef public double rings_at
    cdef public object none_left

    cdef int put(self, PublishPath publish) except -1


cdef class LimitPath:
    cdef readonly Py_ssize_t limit
    cdef public Py_ssize_t used
    cdef public Py_ssize_t admitted
    cdef readonly object queue          # an OrderedDict: who waits -> weight

    cdef bint has_room(self, Py_ssize_t weight) except -1


cdef class PublishPath:
    cdef public object body
    cdef public object encoding
    cdef public Py_ssize_t weight
    cdef public object destination
    cdef public double deadline
    cdef public object key
    cdef public bint is_plain
    cdef public bint is_alone
    cdef public Command attempt
    cdef public bint done
    cdef public object error
    cdef public object waiter
    cdef public object promised
    cdef public object group
    cdef public object context
    cdef public bint _asyncio_future_blocking
    cdef object _cancelled      # what the task that awaits it gets

    cdef Py_ssize_t record_size(self) except -1
    cdef Wakeups _wakeups(self)
    cdef object wait_in(self, current, Wakeups wakeups)
    cpdef bint read_soon(self, Wakeups wakeups) except -1


cdef class Command:
    cdef public object destination
    cdef public list publishes
    cdef public object partition
    cdef public object name
    cdef public object conn
    cdef public bint is_overdue


cdef class QueuePath:
    cdef public object topic
    cdef public list links
    cdef readonly object waiting        # a deque of PublishPath
    cdef public object held_bytes
    cdef public object partition
    cdef public object successor
    cdef public Command on_wire
    cdef public Py_ssize_t in_flight
    cdef public bint is_idle
    cdef public SendPath sender
    cdef public bint is_for_any_link
    cdef public bint _is_pipelined
    cdef bint _is_pumping

    cdef object _choose_link(self)
    cdef int _join(self, PublishPath publish) except -1
    cdef bint _send_next(self) except -1


cdef class SendPath:
    cdef public PendingPath pending
    cdef public LimitPath pending_limit
    cdef public Py_ssize_t stored_count
    cdef public Py_ssize_t refused_count
    cdef public Py_ssize_t unknown_count
    cdef public object timed
    cdef public Wakeups wakeups
    cdef public bint lingers
    cdef public Py_ssize_t most
    cdef public Py_ssize_t enough
    cdef public Py_ssize_t limit
    cdef public dict heard

    cdef bint has_company(self) except -1
    cdef int send(self, Command command, link) except -1
    cdef int _write(self, Command command, bytes data, link) except -1


cpdef list take_command(waiting, Py_ssize_t most, Py_ssize_t enough, Py_ssize_t limit)


cdef class ProducerPath:
    cdef public bint _is_running
    cdef public dict _routes
    cdef public object _thread
    cdef public object _trace
    cdef public object _composer        # says what goes with a body that is traced
    cdef public double _timeout
    cdef public LimitPath _pending_limit
    cdef public Wakeups _wakeups
    cdef public object _home            # the loop of asyncio that the producer belongs to
    cdef public object _get_loop        # the loop of asyncio that runs here
    cdef public object _ready           # what that loop is about to do
    cdef public object _new_publish     # makes a Publish
    cdef public object _plain           # the encoding of what says nothing but a body
    cdef public object _plain_batch     # the same of bodies

    cdef object _route_of(self, topic)
    cdef PublishPath _on_its_way(self, PublishPath publish)
    cdef PublishPath _prepared_batch(self, topic, bodies)
    cdef PublishPath _make(self, queue, body, encoding, Py_ssize_t weight)
    cdef object _end_of(self, PublishPath publish, QueuePath queue, Wakeups wakeups, current)


cdef class Latch:
    cdef PyThread_type_lock _lock  # taken while it is closed
    cdef readonly bint is_open
    cdef bint _is_one_of_many  # it was opened together with others


cdef class PlainPath:
    cdef readonly object producer
    cdef readonly object topic
    cdef readonly object content
    cdef readonly Latch latch
    cdef public object error
    cdef public object parts
    cdef public object job
    cdef public bint is_cancelled
    cdef readonly bint is_set
