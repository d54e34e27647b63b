"""Files of a program that change while it is being developed, by watchfiles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from nsq_fast.errors import ConfigError


class FileWatch:
    """Watches the Python files below a folder, in a native thread. Raises ConfigError without watchfiles.

    Args:
        on_change: called in that thread with one of the files that changed.
    """

    def __init__(self, folder: Path, on_change: Callable[[str], object]) -> None:
        try:
            import watchfiles
        except ImportError as error:
            raise ConfigError("reload needs watchfiles: pip install 'nsq-fast[reload]'") from error
        self._stop = threading.Event()
        changes = watchfiles.watch(
            folder, watch_filter=watchfiles.PythonFilter(), stop_event=self._stop, raise_interrupt=False
        )

        def follow() -> None:
            for changed in changes:
                on_change(min(path for _, path in changed))

        threading.Thread(target=follow, name="nsq_fast reload", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()
