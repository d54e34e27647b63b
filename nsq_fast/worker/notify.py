"""systemd's notifications: READY=1, STOPPING=1, WATCHDOG=1 and so on, to the socket that it names (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from time import CLOCK_MONOTONIC, clock_gettime_ns


class Notifier:
    """Tells systemd; does nothing where there is none.

    Attributes:
        watchdog_interval: seconds between WATCHDOG=1, half of what systemd allows; None: it does not watch.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._path = environment.get("NOTIFY_SOCKET", "")
        usec = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval = int(usec) / 2e6 if usec.isdecimal() and int(usec) and is_ours else None
        self._status = ""

    def tell(self, *words: str) -> None:
        """Send ``READY=1`` and such, all in one."""
        if not self._path:
            return
        path = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(path)
            sock.sendall("\n".join(words).encode())

    def reloading(self) -> None:
        """A restart begins; READY=1 ends it."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={clock_gettime_ns(CLOCK_MONOTONIC) // 1000}")

    def status(self, text: str) -> None:
        """Say how it is, where it differs from the last time."""
        if text != self._status:
            self._status = text
            self.tell(f"STATUS={text}")
