"""Publishes that say nothing but a topic and a body; see the .pyx."""

from nsq_fast._send_permit cimport SendPermit


cdef class PlainPublish:
    cdef readonly str topic
    cdef readonly bytes content
    cdef readonly object awaited
    cdef readonly object callers
    cdef public object result
    cdef public object error
    cdef public object parts
    cdef public object job
    cdef public bint is_cancelled


cdef class RequestQueue:
    cdef readonly object requests
    cdef readonly object thread
    cdef public bint is_taking
    cdef object _new, _usual_result, _take
    cdef object _append, _popleft, _appendleft

    cpdef hand_over(self, request)
    cdef PlainPublish plain(self, topic, body, awaited, callers)


cdef class ThreadPublisher:
    cdef RequestQueue _queue
    cdef object _callers, _abandon, _hub_of_thread


cdef class TaskPublisher:
    cdef RequestQueue _queue
    cdef SendPermit _permit
    cdef object _callers, _loop, _running_loop, _create_future, _try_send
