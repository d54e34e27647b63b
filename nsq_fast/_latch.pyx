"""What one thread waits for until another opens it, compiled: many are opened without the interpreter's lock.

A thread that wakes up wants the interpreter's lock (GIL) next. While whoever
wakes it has that, it falls asleep once more: sixteen threads that wait for
their replies are woken sixteen times, and fall asleep and wake up again sixteen
times for the lock. So they are opened together, after the lock was let go, and
those that were take turns: each offers its core to the others until the one
that went before it waits again, and finds the interpreter's lock free then.
That is a third of the switches (``nsq-fast bench publish --client "nsq_fast
threads" --mode concurrent``).
"""

from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc

import sys
from time import monotonic

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
    LONGEST = 100_000_000  # seconds: three years, which the system's clocks can count to
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
    """Closed until somebody opens it, for good. Any thread may open it, and any number may wait for it.

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

    def open(self):
        """Open it. Once more is no harm."""
        if not self.is_open:
            self.is_open = True
            PyThread_release_lock(self._lock)

    def wait(self, timeout=None):
        """Block the thread until it is open; whether it was within ``timeout`` seconds. Signals are handled meanwhile.
        """
        return self.block(timeout)

    cdef bint block(self, timeout) except -1:
        """As ``wait``, for compiled code."""
        global is_turn_taken
        cdef PY_TIMEOUT_T microseconds = -1
        cdef PyLockStatus status
        cdef double end = 0.0
        if self.is_open:
            return True
        if timeout is not None:
            end = monotonic() + timeout
        is_turn_taken = False
        while True:
            if timeout is not None:
                microseconds = <PY_TIMEOUT_T>(1e6 * min(LONGEST, max(0.0, end - monotonic())))
            with nogil:
                status = PyThread_acquire_lock_timed(self._lock, microseconds, 1)
                if self._is_one_of_many:
                    take_turn()
            if status == PY_LOCK_ACQUIRED:
                PyThread_release_lock(self._lock)  # it stays open, for others who wait
                return True
            if status == PY_LOCK_FAILURE:
                return self.is_open
            PyErr_CheckSignals()


def open_all(latches):
    """Open several. Their threads find the interpreter's lock free, so the caller has it again after some of them."""
    cdef tuple held = tuple(latches)  # nothing is freed before it is open
    cdef PyThread_type_lock* locks = <PyThread_type_lock*>PyMem_Malloc(max(1, len(held)) * sizeof(PyThread_type_lock))
    cdef Py_ssize_t count = 0, number
    cdef Latch latch
    if locks is NULL:
        raise MemoryError("no memory is left to open latches")
    try:
        for latch in held:
            if not latch.is_open:
                latch.is_open = True
                locks[count] = latch._lock
                count += 1
        if count == 1:  # the caller lets go of the lock soon enough, and need not wait for it here
            PyThread_release_lock(locks[0])
        elif count:
            for latch in held:
                latch._is_one_of_many = has_gil
            with nogil:
                for number in range(count):
                    PyThread_release_lock(locks[number])
    finally:
        PyMem_Free(locks)
