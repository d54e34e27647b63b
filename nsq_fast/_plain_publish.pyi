from collections import deque
from collections.abc import Callable
from typing import Any

from nsq_fast._latch import Latch

class PlainPublish(Latch):
    @property
    def topic(self) -> str: ...
    @property
    def content(self) -> bytes: ...
    answer: Callable[[PlainPublish], object]
    result: Any
    error: BaseException | None
    parts: Any
    job: Any
    is_cancelled: bool
    def set(self, value: Any = None) -> None: ...
    def set_exception(self, error: BaseException) -> None: ...

class RequestQueue:
    @property
    def requests(self) -> deque[Any]: ...
    is_taking: bool
    def __init__(
        self,
        new: Callable[[], PlainPublish],
        usual_result: bytes,
        answer: Callable[[PlainPublish], object],
        thread: Any,
        take: Callable[[], object],
        abandon: Callable[[Any], object],
        hub_of_thread: Callable[[], object],
    ) -> None: ...
    def publish(self, topic: Any, body: Any) -> Any: ...
    def take_alike(self, most: int) -> tuple[list[Any], list[bytes]]: ...
