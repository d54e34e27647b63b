"""Whether ``link`` is what a journal in a file system needs. It is tried in the folder itself."""

from __future__ import annotations

import contextlib
import os
import uuid

from nsq_fast.errors import ConfigError

NEEDED = (
    "a journal needs a local or network file system with hard links (ext4, XFS, NFS...), mounted at the same path on"
    " the driver and all executors: two attempts of a task must not be able to write the same file"
)


def check_links(folder: str) -> None:
    """Prove in an existing folder that ``link`` makes a second name, and refuses one that there is.

    Raises ConfigError where it does not.
    """
    first, second = (os.path.join(folder, f"t-{uuid.uuid4().hex}") for _ in range(2))
    try:
        for path in (first, second):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not _refuses(first, second):
            raise ConfigError(f"journal={folder!r}: link() replaces a file that there is; {NEEDED}")
        os.unlink(second)
        os.link(first, second)
        if not os.path.samefile(first, second):
            raise ConfigError(f"journal={folder!r}: link() makes a copy; {NEEDED}")
    except OSError as error:
        raise ConfigError(f"journal={folder!r}: {error.strerror or error}; {NEEDED}") from error
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _refuses(existing: str, taken: str) -> bool:
    try:
        os.link(existing, taken)
    except FileExistsError:
        return True
    return False
