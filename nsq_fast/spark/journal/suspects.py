"""Messages that are in the journal and may be delivered once more; kept until they are, or for a day.

They are the messages of segments whose FINs a dead attempt may not have sent,
and those whose FIN came too late. A message is recognised by its id and its
timestamp, which the server keeps when it delivers the message again, and over
a restart.

Tasks add files; the driver alone changes and removes them.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable

from .segment import KEY_SIZE
from .storage import Storage

RETENTION = 24 * 3600.0
"""How long a message is waited for: it may lie behind a long queue, or in an nsqd that is down."""

_SUFFIX = ".keys"


class Suspects:
    """The suspects of one journal, in a place of their own."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def add(self, keys: Iterable[bytes]) -> None:
        """Keep these, stored for good when it returns."""
        data = b"".join(keys)
        if data:
            self.storage.claim(f"{int(time.time())}-{uuid.uuid4().hex}{_SUFFIX}", [data])

    def load(self) -> set[bytes]:
        """All of them."""
        return {key for name in self._names() for key in self._read(name)}

    def forget(self, seen: Iterable[bytes]) -> None:
        """Drop those that have come, and those that are too old. For the driver."""
        gone = set(seen)
        for name in self._names():
            if time.time() - int(name.partition("-")[0]) > RETENTION:
                self.storage.remove(name)
                continue
            keys = self._read(name)
            left = [key for key in keys if key not in gone]
            if not left:
                self.storage.remove(name)
            elif len(left) < len(keys):
                self.storage.replace(name, b"".join(left))

    def _names(self) -> list[str]:
        return [name for name in self.storage.names() if name.endswith(_SUFFIX)]

    def _read(self, name: str) -> list[bytes]:
        data = b""
        with contextlib.suppress(FileNotFoundError):  # the driver may just have dropped it
            data = bytes(self.storage.view(name))
        return [data[at : at + KEY_SIZE] for at in range(0, len(data), KEY_SIZE)]
