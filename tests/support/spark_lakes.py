"""The jars of Delta Lake, Iceberg, Avro and Protobuf for the installed PySpark, where Maven or Ivy has put them.

python -m support.spark_lakes       # what Maven is to get: one ``group:artifact:version`` a line
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

LAKES = {
    ("avro", "4.0"): ("org.apache.spark:spark-avro_2.13:4.0.1",),
    ("avro", "4.1"): ("org.apache.spark:spark-avro_2.13:4.1.1",),
    ("avro", "4.2"): ("org.apache.spark:spark-avro_2.13:4.2.0",),
    ("protobuf", "4.0"): ("org.apache.spark:spark-protobuf_2.13:4.0.1",),
    ("protobuf", "4.1"): ("org.apache.spark:spark-protobuf_2.13:4.1.1",),
    ("protobuf", "4.2"): ("org.apache.spark:spark-protobuf_2.13:4.2.0",),
    ("delta", "4.0"): ("io.delta:delta-spark_2.13:4.0.0", "io.delta:delta-storage:4.0.0"),
    ("delta", "4.1"): ("io.delta:delta-spark_4.1_2.13:4.1.0", "io.delta:delta-storage:4.1.0"),
    ("iceberg", "4.0"): ("org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0",),
    ("iceberg", "4.1"): ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",),
}
"""By format and version of PySpark: each release of them is for one, and newer ones have none yet."""

_MAVEN = Path(os.environ.get("NSQ_FAST_MAVEN", Path.home() / ".m2" / "repository"))


def pyspark() -> str:
    """The version that is installed, as ``4.1``."""
    return ".".join(version("pyspark").split(".")[:2])


def jars(lake: str) -> tuple[list[Path], str]:
    """The jars, and a reason when they cannot be had."""
    artifacts = LAKES.get((lake, pyspark()))
    if artifacts is None:
        return [], f"{lake} has no release for PySpark {pyspark()} that is known to the tests"
    found = [_path(artifact) for artifact in artifacts]
    missing = [artifact for artifact, path in zip(artifacts, found, strict=True) if not path.exists()]
    return found, f"mvn dependency:get -Dartifact={missing[0]} was not run" if missing else ""


def _path(artifact: str) -> Path:
    group, name, number = artifact.split(":")
    of_ivy = Path.home().glob(f".ivy2*/jars/{group}_{name}-{number}.jar")
    return next(of_ivy, _MAVEN.joinpath(*group.split("."), name, number, f"{name}-{number}.jar"))


if __name__ == "__main__":
    for (_, wanted), artifacts in LAKES.items():
        if wanted == pyspark():
            sys.stdout.writelines(f"{artifact}\n" for artifact in artifacts)
