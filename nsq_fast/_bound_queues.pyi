from collections.abc import Callable
from typing import Any

class BoundQueues:
    partitions: dict[int, Any]
    partition_num: int
    held: Any
    @property
    def partition_of_key(self) -> Callable[[Any, int], int]: ...
    def __init__(
        self, partition_of_key: Callable[[Any, int], int], hash_of_key: Callable[[bytes, int, bool], int] | None
    ) -> None: ...
    def bound(self, key: Any, partition: Any) -> Any: ...
