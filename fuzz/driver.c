/* libFuzzer's entry points: a Python interpreter is started once, and check_readers of readers.pyx gets each input. */

#include <Python.h>

#include "readers_api.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    Py_Initialize();
    if (import_readers() < 0) {
        PyErr_Print();
        abort();
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return check_readers(data, (Py_ssize_t)size);
}
