"""What the tests of Spark need of a machine: a Java, pyspark, a browser; found, or said clearly to be missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from support.waiting import PROCESS

OLDEST_JAVA = 17
NO_JAVA = "no Java: install a JRE 17 or newer (Debian: openjdk-17-jre-headless)"
NO_PYSPARK = "no pyspark: make setup installs it with Python 3.11 or newer (the extra nsq-fast[spark])"
NO_CHROMIUM = "no Chromium: install it (Debian: chromium)"


@cache
def find_java() -> Path | None:
    """The java that Spark would use, if it is new enough."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    return Path(java) if java and _java_version(java) >= OLDEST_JAVA else None


def _java_version(java: str) -> int:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=PROCESS, check=False)
    except OSError:
        return 0
    found = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr)
    return int(found[2] if found[1] == "1" else found[1]) if found else 0


@cache
def find_chromium() -> Path | None:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return Path(found)
    return None


def missing_modules() -> str | None:
    """Why no test of Spark can even be imported here; None when all can."""
    return None if all(find_spec(name) for name in ("pyspark", "pyarrow", "pandas")) else NO_PYSPARK


def missing_for_spark() -> str | None:
    """Why Spark cannot run here; None when it can."""
    return missing_modules() or (None if find_java() else NO_JAVA)


def header() -> list[str]:
    java, chromium = find_java(), find_chromium()
    lines = [
        f"Java: {java}" if java else f"Java: none: the Spark tests are skipped; {NO_JAVA.partition(': ')[2]}",
        f"Chromium: {chromium}" if chromium else "Chromium: none: reports are not looked at in a browser",
    ]
    if missing_modules():
        lines.append(f"pyspark: none: the Spark tests are skipped; {NO_PYSPARK.partition(': ')[2]}")
    return lines
