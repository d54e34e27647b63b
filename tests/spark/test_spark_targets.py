"""Tables that a stream of NSQ is written to: the programs of docs/spark.md, each with a batch that Spark runs again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import spark_lakes
from support.spark_driver import Driver
from support.spark_marks import LIMIT
from support.spark_settings import ROOT, spark_environment, spark_settings

from nsq_fast import Producer
from nsq_fast.broker import BrokerProcess

PAGE = (ROOT / "docs" / "spark.md").read_text().partition("<!-- targets:begin")[2].partition("<!-- targets:end")[0]
DELTA, ICEBERG, PIPELINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

# The programs have settings of their own: the test's are those of the command that starts them.
RUN = """
import os
from support.spark_program import arguments, say

os.environ["PYSPARK_SUBMIT_ARGS"] = arguments()["submit"]
exec(arguments()["text"])
say("rows", bodies=sorted(bytes(row.body).decode() for row in rows.select("body").collect()))
"""


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as running:
        yield running


def publish(broker: BrokerProcess, count: int, name: str) -> list[str]:
    texts = [f"{name}{number}" for number in range(count)]
    with Producer(lookupd_http_addresses=str(broker.lookupd.http)) as producer:
        producer.multipublish("orders", [text.encode() for text in texts])
    return texts


def here(program: str, broker: BrokerProcess, folder: Path) -> str:
    """A program of the page, with the places of this test."""
    assert "127.0.0.1:4161" in program
    return program.replace("127.0.0.1:4161", str(broker.lookupd.http)).replace("/var/lib", str(folder))


@pytest.mark.parametrize(("lake", "program"), [("delta", DELTA), ("iceberg", ICEBERG)])
def test_a_batch_that_is_run_again_is_in_a_table_once(
    lake: str, program: str, broker: BrokerProcess, spark_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    jars, reason = spark_lakes.jars(lake)
    if reason:
        pytest.skip(reason)
    (tmp_path / "orders").mkdir()
    settings = {**spark_settings("local[2]", tmp_path), "spark.jars": ",".join(map(str, jars))}
    del settings["spark.sql.codegen.factoryMode"]  # their own expressions have to be compiled
    submit = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    text = here(program, broker, tmp_path)
    driver = spark_driver(RUN, text=text, submit=shlex.join([*submit, "pyspark-shell"]))

    def rows() -> list[str]:
        driver.start()
        driver.wait()
        found: list[str] = driver.said("rows")[-1]["bodies"]
        return found

    texts = publish(broker, 50, "first")
    assert rows() == sorted(texts)
    commits = tmp_path / "orders" / "checkpoint" / "commits"
    for file in (commits / "0", commits / ".0.crc"):
        file.unlink()  # as if killed between the commit of the table and that of Spark
    assert rows() == sorted(texts)
    texts += publish(broker, 10, "second")
    assert rows() == sorted(texts)


def test_a_declarative_pipeline_reads_what_there_is(java: None, broker: BrokerProcess, tmp_path: Path) -> None:
    pytest.importorskip("pyspark.pipelines", reason="PySpark has declarative pipelines from 4.1 on")
    pytest.importorskip("yaml", reason="pyspark[pipelines] is not installed")
    from pyarrow import parquet

    (tmp_path / "orders").mkdir()
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(here(PIPELINE, broker, tmp_path))
    (tmp_path / "spark-pipeline.yml").write_text(
        f"name: orders\nstorage: file://{tmp_path}/storage\nlibraries:\n  - glob:\n      include: transformations/**\n"
    )
    texts = publish(broker, 50, "order")
    run_pipeline(tmp_path)
    found = parquet.read_table(tmp_path / "warehouse" / "orders", columns=["body"])["body"].to_pylist()
    assert sorted(body.decode() for body in found) == sorted(texts)
    sizes = parquet.read_table(tmp_path / "warehouse" / "sizes").to_pylist()
    assert sum(row["count"] for row in sizes) == len(texts)


def run_pipeline(folder: Path) -> None:
    settings = spark_settings("local[2]", folder)
    del settings["spark.master"]  # the command makes its own server
    conf = folder / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    environment = {**spark_environment(), "SPARK_CONF_DIR": str(conf)}
    environment["SPARK_TESTING"] = "1"  # with it the server takes a port that is free
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [str(Path(sys.executable).with_name("spark-pipelines")), "run", "--spec", "spark-pipeline.yml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
