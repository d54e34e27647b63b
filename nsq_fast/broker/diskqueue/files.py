"""Small files that are replaced as a whole, and what becomes of one that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

from .segment import BAD_SUFFIX


def replace_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a file so that it is the old one or the new one, whatever happens. After an OSError it is the old one."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # On a disk that is nearly full a write takes a part of the data, and only the next one fails.
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)


def set_aside(path: Path) -> str:
    """Rename a file that cannot be read; a clause for the log that says what became of it."""
    aside = path.with_name(path.name + BAD_SUFFIX)
    try:
        path.replace(aside)
    except OSError as error:
        return f"the file could not be renamed: {error}"
    return f"the file is kept as {aside}"
