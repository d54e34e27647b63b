"""Check that the Python that Spark starts for its workers can run the source: it need not be the one of the driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from typing import Any

from nsq_fast.errors import ConfigError

_TIMEOUT = 60.0
_PROBE = """
import sys
if sys.version_info[:2] != {version}:
    sys.exit("is Python %d.%d, and the driver {version[0]}.{version[1]}" % sys.version_info[:2])
try:
    import nsq_fast.runtime.column_producer, pyarrow, pandas  # the one that needs most of what nsq_fast depends on
except ImportError as error:
    sys.exit("has no " + str(error.name))
"""


def check_workers(spark: Any) -> None:
    """Raise ConfigError when the workers of a session on this machine have another Python, or one without nsq_fast.

    A session of Spark Connect is not looked at: its workers are the server's.
    """
    context = getattr(spark, "_sc", None)
    python = getattr(context, "pythonExec", None)
    if python is None or _is_this(python):
        return
    fault = _fault(python, os.environ.get("PYTHONPATH", ""))
    if fault:
        raise ConfigError(
            f"the Python of Spark's workers, {python}, {fault}: set PYSPARK_PYTHON={sys.executable} in the environment"
            " before the session is made, or install nsq-fast[spark] there"
        )


def _is_this(python: str) -> bool:
    # In the same folder, too: the python of a virtual environment is a link to one that lacks its packages.
    found = shutil.which(python)
    return found is not None and all(
        name(os.path.abspath(found)) == name(os.path.abspath(sys.executable))
        for name in (os.path.dirname, os.path.realpath)
    )


@lru_cache
def _fault(python: str, path: str) -> str:
    """What is amiss with an interpreter, in words; empty for nothing. ``path``: PYTHONPATH, of which it depends."""
    program = _PROBE.format(version=sys.version_info[:2])
    try:
        done = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be started ({error})"
    if not done.returncode:
        return ""
    return done.stderr.strip().rpartition("\n")[2] or f"ends with status {done.returncode}, and says nothing"
