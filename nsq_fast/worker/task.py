"""What the supervisor tells a process when it starts it."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections.abc import Callable

from .settings import Settings

_LENGTH = struct.Struct("!I")


@dataclasses.dataclass(frozen=True)
class Task:
    """All that a process has to know.

    Attributes:
        target, folder: what to run, see ``program.load``.
        is_check: whether the process shall only say what it would run.
    """

    target: str
    folder: str
    settings: Settings
    is_check: bool = False


def pack(task: Task) -> bytes:
    """A task as it is sent. It may hold secrets, so that it is neither an argument nor in the environment."""
    content = pickle.dumps(task)
    return _LENGTH.pack(len(content)) + content


def unpack(read: Callable[[int], bytes]) -> Task:
    """A task that ``pack`` made; ``read`` gives so many bytes. Only for what the supervisor sends."""
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    task: Task = pickle.loads(read(length))
    return task
