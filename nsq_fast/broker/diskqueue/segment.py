"""One file of a log."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .damage import Piece
from .open_files import OPEN_FILES

SUFFIX = ".log"
BAD_SUFFIX = ".bad"
"""Added to the name under which a damaged file is kept, as the original does (nsqio/go-diskqueue: handleReadError)."""


def write_behind(fd: int, size: int, data: bytes | bytearray) -> None:
    """Add bytes to a file behind its first ``size`` ones: all, or none when it raises OSError."""
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(fd, data[written:] if written else data, size + written)
    except OSError:
        # Should this fail as well, the next write covers what was written of this one.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


_IN_MEMORY = 16 * 1024
"""A file without a name comes into being when there is more than that: it would take a descriptor for little."""


class Segment:
    """One file of the log; without a path a file that has no name and goes with the process.

    Attributes:
        first: the number of its first record.
        size: its bytes.
        pieces: what is whole in it, once damage was found; None: no damage is known. A damaged file is not written to.
    """

    __slots__ = ("_fd", "_memory", "first", "path", "pieces", "size")

    def __init__(self, path: Path | None, first: int, size: int = 0) -> None:
        self.path = path
        self.first = first
        self.size = size
        self.pieces: Sequence[Piece] | None = None
        self._fd = -1
        self._memory = bytearray()
        if path is not None:
            self._open(path, os.O_CREAT)

    def __str__(self) -> str:
        return "a file of the log in memory" if self.path is None else str(self.path)

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset`` on. Raises OSError."""
        size = max(0, min(size, self.size - offset))
        if self._fd < 0:
            if self.path is None:
                return bytes(self._memory[offset : offset + size])
            self._open(self.path)
        return os.pread(self._fd, size, offset)

    def write(self, data: bytes) -> None:
        """Add bytes at the end: all, or none when it raises OSError."""
        if self._fd < 0:
            if self.path is not None:
                self._open(self.path)
            elif self.size + len(data) <= _IN_MEMORY:
                self._memory += data
                self.size += len(data)
                return
            else:
                self._spill()
        write_behind(self._fd, self.size, data)
        self.size += len(data)

    def _open(self, path: Path, flags: int = 0) -> None:
        self._fd = os.open(path, os.O_RDWR | flags, 0o600)
        OPEN_FILES.add(self, self.close)

    def _spill(self) -> None:
        fd = _nameless_file()
        try:
            write_behind(fd, 0, self._memory)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._memory = bytearray()

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""
        fd = self.duplicate()
        if fd is not None:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def duplicate(self) -> int | None:
        """Another descriptor of the file, for the caller to close; None where what there is is in memory."""
        if self._fd < 0:
            if self.path is None:
                return None
            self._open(self.path)
        return os.dup(self._fd)

    def close(self) -> None:
        """Close the file. One with a path is opened again when it is used again."""
        OPEN_FILES.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def pieces_end(self) -> int:
        """The number after that of the last whole record; at least one after its first, which is in its name."""
        return max([self.first + 1, *(piece.end for piece in self.pieces or ())])

    @property
    def aside(self) -> Path | None:
        """The name under which it is kept if it is damaged; None for a file without a name."""
        return None if self.path is None else self.path.with_name(self.path.name + BAD_SUFFIX)

    def keep_aside(self) -> Path | None:
        """Give the file a second name, which stays when the first one is removed. None if that is not possible."""
        aside = self.aside
        if self.path is None or aside is None:
            return None
        try:
            os.link(self.path, aside)
        except FileExistsError:
            pass
        except OSError:
            return None
        return aside

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _nameless_file() -> int:
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())
