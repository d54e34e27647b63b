"""What runs in one process where tests run side by side: the tests of a file, and of files that share a fixture.

A session of Spark is a JVM that takes seconds to start and to warm up, and half a gigabyte, in every process that
wants one; a standalone cluster is three.
"""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadFileScheduling

from . import kinds


class TogetherByFile(LoadFileScheduling):
    """As ``--dist loadfile``, with the files of each of ``kinds.SHARING`` as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((name for name, files in kinds.SHARING.items() if Path(file).stem in files), file)
