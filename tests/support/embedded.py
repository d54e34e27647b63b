"""An embedded nsqd for the fixture ``nsqd``: a module that names it ``NSQD`` gets it instead of a scripted one."""

from __future__ import annotations

from nsq_fast.broker import NsqdServer


class EmbeddedNsqd(NsqdServer):
    """Started as soon as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.start()
