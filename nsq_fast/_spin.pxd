"""Tries to read from a socket that does not block; see the .pyx."""


cpdef bytes recv_soon(int fd, Py_ssize_t size, int microseconds)
