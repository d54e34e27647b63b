"""A home of Spark in which its Pythons import pyspark as it is installed, that is, compiled.

Spark has them import it from ``pyspark.zip`` in its home. That file holds
sources only, so each of the ten Pythons of a small query compiles what it
imports: 0.9 s instead of 0.3. Here an empty folder has the place of that file.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def make_home(target: Path) -> None:
    """Make it unless it is there, of the pyspark that is installed."""
    import pyspark

    installed = Path(pyspark.__file__).parent
    if (target / "bin").resolve() != (installed / "bin").resolve():
        shutil.rmtree(target, ignore_errors=True)
        _make(installed, target)


def _make(installed: Path, target: Path) -> None:
    for zipped in (installed / "python" / "lib").glob("*.zip"):
        (target / "python" / "lib" / zipped.name).mkdir(parents=True)  # Spark looks whether it exists
    for name in ("jars", "sbin", "bin"):  # the last one tells that it is whole
        (target / name).symlink_to(installed / name)
