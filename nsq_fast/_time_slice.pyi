from collections import deque
from collections.abc import Callable
from typing import Any

from ._codec import Message

class Caller:
    current: Message | list[Message] | None
    began: float
    end: float

class TimeSlice:
    end: float
    tell: Callable[[Message], object] | None
    max_age: int
    def __init__(self, finished: list[Message], schedule: Callable[[], object], end: float) -> None: ...
    def handle(
        self, caller: Caller, inbound: Any, acknowledger: Any, handler: Callable[[Any, Message], object]
    ) -> bool: ...
    def begin(
        self, caller: Caller, inbound: Any, acknowledger: Any, handler: Callable[[Any, Message], Any]
    ) -> Message | tuple[Any, Any, Any] | None: ...
    def returned(self, message: Message) -> bool: ...
    def all_returned(self, messages: list[Message]) -> None: ...
    def take_count(self) -> int: ...

def hold_clock(now: float) -> None: ...
def take(waiting: deque[Message], count: int) -> tuple[list[Message], int]: ...
