from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

COUNT_BYTES: int
LENGTH_BYTES: int

class Wakeups:
    is_waking: bool
    @property
    def loop(self) -> Any: ...
    def __init__(self, hub: Any, getcurrent: Callable[[], Any] | None, loop: Any) -> None: ...
    def add(self, awaited: Any) -> None: ...
    def wait_for(self, awaited: Any) -> None: ...

class PendingPath:
    none_left: Any
    rings_at: float
    @property
    def publishes(self) -> dict[Any, None]: ...

class LimitPath:
    used: int
    admitted: int
    @property
    def limit(self) -> int: ...
    @property
    def queue(self) -> OrderedDict[Any, int]: ...
    def __init__(self, limit: int) -> None: ...

class PublishPath:
    body: Any
    encoding: Any
    weight: int
    destination: Any
    deadline: float
    key: Any
    is_plain: bool
    is_alone: bool
    attempt: Command | None
    done: bool
    error: BaseException | None
    waiter: Any
    promised: Any
    group: Any
    context: Any
    def __init__(self, destination: Any, body: Any, deadline: float, encoding: Any, weight: int = 1) -> None: ...
    def wait(self, wakeups: Wakeups) -> Any: ...
    def __await__(self) -> Generator[Any]: ...
    def get_loop(self) -> Any: ...
    def add_done_callback(self, callback: Callable[[Any], object], *, context: Any) -> None: ...
    def cancel(self, msg: Any = None) -> bool: ...
    def result(self) -> None: ...
    def read_soon(self, wakeups: Wakeups) -> bool: ...

class Command:
    destination: Any
    publishes: list[Any]
    partition: int | None
    name: str
    conn: Any
    is_overdue: bool

class QueuePath:
    sender: Any
    topic: str
    links: list[Any]
    held_bytes: int | None
    partition: int | None
    successor: Callable[[Any], Any] | None
    on_wire: Command | None
    in_flight: int
    is_idle: bool
    is_for_any_link: bool
    @property
    def waiting(self) -> deque[Any]: ...
    def __init__(self, sender: Any, topic: str, links: list[Any]) -> None: ...
    def add(self, publish: PublishPath) -> None: ...
    def pump(self) -> None: ...
    def stored(self) -> None: ...

_P = TypeVar("_P", bound=PublishPath)

def take_command(waiting: deque[_P], most: int, enough: int, limit: int) -> list[_P]: ...

class SendPath:
    pending: Any
    pending_limit: Any
    stored_count: int
    refused_count: int
    unknown_count: int
    timed: Callable[[Any], object] | None
    wakeups: Wakeups
    lingers: bool
    most: int
    enough: int
    limit: int
    heard: dict[str, Any]
    def replied(self, conn: Any, command: Command, data: bytes) -> None: ...

class ProducerPath:
    _is_running: bool
    _routes: dict[str, Any]
    _thread: Any
    _trace: Any
    _composer: Any
    _home: Any
    _get_loop: Any
    _ready: Any
    _timeout: float
    _pending_limit: Any
    _wakeups: Wakeups
    _new_publish: Any
    _plain: Any
    _plain_batch: Any
    def _publish_usual(self, topic: Any, body: Any, key: Any, partition: Any, trace_id: Any) -> Any: ...
    def _multipublish_usual(self, topic: Any, bodies: Any) -> bytes | None: ...
    def _prepared(self, topic: Any, body: Any, key: Any, partition: Any, trace_id: Any) -> Any: ...
    def _sent_usual(self, topic: Any, body: Any, key: Any, partition: Any, trace_id: Any) -> Any: ...
    def _sent_batch_usual(self, topic: Any, bodies: Any) -> Any: ...
    def _sent_for_thread(self, request: Any, blocked: set[Any]) -> bool: ...

class Latch:
    @property
    def is_open(self) -> bool: ...
    def wait(self) -> None: ...

class PlainPath:
    error: BaseException | None
    parts: Any
    job: Any
    is_cancelled: bool
    @property
    def producer(self) -> Any: ...
    @property
    def topic(self) -> str: ...
    @property
    def content(self) -> bytes: ...
    @property
    def latch(self) -> Latch: ...
    @property
    def is_set(self) -> bool: ...
    def __init__(self, producer: Any, topic: str, content: bytes) -> None: ...
    def set(self, value: Any) -> None: ...
    def set_exception(self, error: BaseException) -> None: ...

def wake_all(requests: list[Any]) -> None: ...
