"""Who may wait for the end of something, and who can only bring it about.

``close()`` is called from anywhere: by a program that wants to wait, in a handler
or a receiver of a signal, which ``close()`` would wait for, in a callback of the
loop, where nothing can wait, and by handlers of the signals of Unix.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import FrameType

from gevent import get_hub, getcurrent
from greenlet import greenlet

from nsq_fast.client.signals import is_emitting

from .supervised import Job, Loop


def may_wait(workers: Iterable[greenlet | None] = ()) -> bool:
    """Whether the calling greenlet may wait for an object to close, of which ``workers`` run the handlers."""
    current = getcurrent()
    return not (must_go_on() or is_emitting() or any(worker is current for worker in workers))


def must_go_on() -> bool:
    """Whether the caller interrupts the hub, or what one of our greenlets does in the background."""
    current = getcurrent()
    return current is get_hub() or (isinstance(current, Loop | Job) and not current.runs_handlers)


def is_interrupting() -> bool:
    """Whether the caller runs in a handler of ``signal.signal``, in the middle of whatever was interrupted by it.

    Nothing may be changed there that the interrupted code may be using; to call ``loop.run_callback`` is safe.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Python calls such a handler, and nothing else, with the frame that is interrupted.
        if frame.f_back is not None and any(value is frame.f_back for value in _arguments(frame)):
            return True
        frame = frame.f_back
    return False


def _arguments(frame: FrameType) -> Iterable[object]:
    code = frame.f_code
    values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        values.extend(frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ()))
    return values
