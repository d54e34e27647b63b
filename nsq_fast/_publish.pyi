from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

COUNT_BYTES: int
LENGTH_BYTES: int

class PublishFields:
    body: Any
    form: Any
    attempt: Any
    error: BaseException | None
    weight: int
    is_alone: bool
    is_plain: bool
    done: bool
    def __init__(self, body: Any, form: Any, weight: int = 1) -> None: ...

_P = TypeVar("_P", bound=PublishFields)

def sent(publishes: Iterable[PublishFields], attempt: Any) -> None: ...
def stored(publishes: Iterable[_P]) -> list[_P]: ...
def take_command(waiting: deque[_P], most: int, enough: int, limit: int) -> list[_P]: ...
