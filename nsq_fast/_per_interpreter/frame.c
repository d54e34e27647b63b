/* The C code of _frame.pyx, compiled so that each interpreter of a process has a state of its own: see _lazy.py. */
#define CYTHON_USE_MODULE_STATE 1
#define CYTHON_USE_TYPE_SPECS 1
#include "../_frame.c"
