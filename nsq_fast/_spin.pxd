"""Tries to read from a socket that does not block; see the .pyx."""


cpdef tuple recv_soon(int fd, Py_ssize_t size, int tries)
