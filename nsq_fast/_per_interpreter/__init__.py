"""The compiled core once more, for interpreters of a process that are not its main one.

``nsq_fast._codec`` and ``_frame``, the compiled modules that ``nsq_fast.protocol`` needs, are built twice
from the same sources. The build beside the sources keeps its types and constants in variables of C: reading them costs
nothing, and all interpreters of a process share them. So it is the main interpreter's. The build in this folder
(``codec.c``, ...) keeps them in the state of the module, of which each interpreter has one, and looks them up: a
message takes a fifth more instructions to decode. So each interpreter may have a lock of its own (PEP 684). More is in
docs/internals.md.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable

_is_main: Callable[[], bool] = getattr(_thread, "_is_main_interpreter", lambda: True)  # CPython has it from 3.12 on


def search_path(path: list[str]) -> list[str]:
    """Where this interpreter looks for the modules of nsq_fast: in this folder first, unless it is the main one."""
    return path if _is_main() else [*__path__, *path]


def require_main_interpreter() -> None:
    """Raise ImportError, saying what to do, in an interpreter that is not the main one of its process."""
    if not _is_main():
        raise ImportError(
            "the client of nsq_fast (Consumer, Producer, and all else that connects) runs in the main interpreter of a"
            " process only, and this is another one. Use it in the main interpreter, or in a process of its own; here,"
            " nsq_fast._codec, nsq_fast._frame and nsq_fast.protocol can be imported"
        )
