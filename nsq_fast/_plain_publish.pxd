"""Publishes of threads that say nothing but a topic and a body; see the .pyx."""

from nsq_fast._latch cimport Latch


cdef class PlainPublish(Latch):
    cdef readonly str topic
    cdef readonly bytes content
    cdef public object answer
    cdef public object result
    cdef public object error
    cdef public object parts
    cdef public object job
    cdef public bint is_cancelled


cdef class RequestQueue:
    cdef readonly object requests
    cdef public bint is_taking
    cdef object _new, _usual_result, _answer, _thread, _take, _abandon, _hub_of_thread
    cdef object _append, _popleft, _appendleft
