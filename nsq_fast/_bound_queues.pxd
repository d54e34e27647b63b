"""Where a publish with a key goes; see the .pyx."""


cdef class BoundQueues:
    cdef public dict partitions
    cdef public unsigned long partition_num
    cdef public object held
    cdef readonly object partition_of_key
    cdef object _hash_of_key

    cdef object _number(self, key)
