"""Check where a journal lies: a file system that all processes see, where ``link`` is atomic and files stay in place.

A value that is no path is refused at load. Whether ``link`` works is tried in
the folder itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid

from nsq_fast.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_WHY = (
    "a journal needs a local or network file system with hard links (ext4, XFS, NFS...), mounted at the same path on"
    " the driver and all executors: two attempts of a task must not be able to write the same file"
)


def check_path(journal: str) -> str:
    """The folder as an absolute path. Raises ConfigError for what cannot be one."""
    path = journal[len("file:") :] if journal.startswith("file:/") else journal
    if path.startswith("//"):
        path = "/" + path.lstrip("/")
    if _URL.match(path):
        raise ConfigError(f"journal={journal!r}: not a path; {_WHY}")
    if not os.path.isabs(path):
        raise ConfigError(f"journal={journal!r}: must be an absolute path: executors have other working directories")
    return os.path.normpath(path)


def check_links(folder: str) -> None:
    """Prove in an existing folder that ``link`` makes a second name, and refuses one that there is.

    Raises ConfigError where it does not.
    """
    first, second = (os.path.join(folder, f"t-{uuid.uuid4().hex}") for _ in range(2))
    try:
        for path in (first, second):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not _refuses(first, second):
            raise ConfigError(f"journal={folder!r}: link() replaces a file that there is; {_WHY}")
        os.unlink(second)
        os.link(first, second)
        if not os.path.samefile(first, second):
            raise ConfigError(f"journal={folder!r}: link() makes a copy; {_WHY}")
    except OSError as error:
        raise ConfigError(f"journal={folder!r}: {error.strerror or error}; {_WHY}") from error
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
