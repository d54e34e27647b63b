"""Messages that are in the journal and may be delivered once more; kept until they are, or for a day.

They are the messages of segments whose FINs a dead attempt may not have sent,
and those whose FIN came too late. A message is recognised by its id and its
timestamp, which the server keeps when it delivers the message again, and over
a restart.

Tasks add files; the driver alone changes and removes them.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator

from .chain import claim_file, replace_file
from .segment import KEY_SIZE

RETENTION = 24 * 3600.0
"""How long a message is waited for: it may lie behind a long queue, or in an nsqd that is down."""

_SUFFIX = ".keys"


class Suspects:
    """The suspects of one journal, in a folder of their own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add(self, keys: Iterable[bytes]) -> None:
        """Keep these, on disk when it returns."""
        data = b"".join(keys)
        if data:
            claim_file(self.folder, f"{int(time.time())}-{uuid.uuid4().hex}{_SUFFIX}", [data])

    def load(self) -> set[bytes]:
        """All of them."""
        return {key for path in self._paths() for key in _read(path)}

    def forget(self, seen: Iterable[bytes]) -> None:
        """Drop those that have come, and those that are too old. For the driver."""
        gone = set(seen)
        for path in self._paths():
            if time.time() - int(os.path.basename(path).partition("-")[0]) > RETENTION:
                os.unlink(path)
                continue
            keys = _read(path)
            left = [key for key in keys if key not in gone]
            if not left:
                os.unlink(path)
            elif len(left) < len(keys):
                replace_file(path, b"".join(left))

    def _paths(self) -> Iterator[str]:
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(_SUFFIX):
                yield os.path.join(self.folder, name)


def _read(path: str) -> list[bytes]:
    data = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # the driver may just have dropped it
        data = file.read()
    return [data[at : at + KEY_SIZE] for at in range(0, len(data), KEY_SIZE)]
