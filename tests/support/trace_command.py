"""`nsq-fast` in a process of its own, with a Spark that starts quickly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .spark_marks import LIMIT
from .spark_settings import quick_environment


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command printed, and its status; ``environment`` goes before the one of the tests."""
    command = [sys.executable, "-m", "nsq_fast", *map(str, arguments)]
    env = {**os.environ, **quick_environment(), "SPARK_LOCAL_IP": "127.0.0.1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
