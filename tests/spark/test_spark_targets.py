"""Programs of docs/spark-examples.md that need jars or a command: formats, tables whose batch runs again, pipelines."""

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

PAGE = (ROOT / "docs" / "spark-examples.md").read_text()
AVRO, PROTOBUF, DELTA, ICEBERG, PIPELINE, MERGE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[4:10]
DELTA_MERGE = MERGE
for iceberg, delta in (
    (
        re.findall(r"settings = \{.*?\n\}\n", MERGE, re.DOTALL)[0],
        re.findall(r"settings = \{.*?\n\}\n", DELTA, re.DOTALL)[0],
    ),
    ("lake.shop.states", "delta.`/var/lib/orders/states`"),
    ("USING iceberg", "USING delta"),
):
    DELTA_MERGE = DELTA_MERGE.replace(iceberg, delta)

# The programs have settings of their own: the test's are those of the command that starts them.
RUN = """
import os
from support.spark_program import arguments, say

os.environ["PYSPARK_SUBMIT_ARGS"] = arguments()["submit"]
exec(arguments()["text"])
rows = globals().get("rows")
if rows is not None:
    bodies = [bytes(row.body).decode() if "body" in row else f"{row.number} {row.state}" for row in rows.collect()]
    say("rows", bodies=sorted(bodies))
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


@pytest.fixture
def with_jars(spark_driver: Callable[..., Driver], broker: BrokerProcess, tmp_path: Path) -> Callable[..., Driver]:
    """A driver of a program of the page, with the jars of this name."""

    def make(name: str, program: str) -> Driver:
        jars, reason = spark_lakes.jars(name)
        if reason:
            pytest.skip(reason)
        (tmp_path / "orders").mkdir()
        settings = {**spark_settings("local[2]", tmp_path), "spark.jars": ",".join(map(str, jars))}
        del settings["spark.sql.codegen.factoryMode"]  # their own expressions have to be compiled
        submit = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        text = here(program, broker, tmp_path)
        return spark_driver(RUN, text=text, submit=shlex.join([*submit, "pyspark-shell"]))

    return make


def rows_of(driver: Driver) -> list[str]:
    driver.start()
    driver.wait()
    found: list[str] = driver.said("rows")[-1]["bodies"]
    return found


def lose_commit(folder: Path, number: int) -> None:
    """As if killed between the commit of the table and that of Spark."""
    commits = folder / "orders" / "checkpoint" / "commits"
    for file in (commits / str(number), commits / f".{number}.crc"):
        file.unlink()


@pytest.mark.parametrize(("lake", "program"), [("delta", DELTA), ("iceberg", ICEBERG)])
def test_a_batch_that_is_run_again_is_in_a_table_once(
    lake: str, program: str, broker: BrokerProcess, with_jars: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = with_jars(lake, program)
    texts = publish(broker, 50, "first")
    assert rows_of(driver) == sorted(texts)
    lose_commit(tmp_path, 0)
    assert rows_of(driver) == sorted(texts)
    texts += publish(broker, 10, "second")
    assert rows_of(driver) == sorted(texts)


@pytest.mark.parametrize(("lake", "program"), [("delta", DELTA_MERGE), ("iceberg", MERGE)])
def test_a_merge_keeps_the_latest_of_each_order(
    lake: str, program: str, broker: BrokerProcess, with_jars: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = with_jars(lake, program)
    with Producer(lookupd_http_addresses=str(broker.lookupd.http)) as producer:
        producer.multipublish("orders", [b'{"number": %d, "state": "new"}' % number for number in range(20)])
        assert rows_of(driver) == sorted(f"{number} new" for number in range(20))
        producer.multipublish("orders", [b'{"number": %d, "state": "paid"}' % number for number in range(5)])
    states = sorted(f"{number} {'paid' if number < 5 else 'new'}" for number in range(20))
    assert rows_of(driver) == states
    lose_commit(tmp_path, 1)
    assert rows_of(driver) == states


@pytest.mark.parametrize(("name", "program"), [("avro", AVRO), ("protobuf", PROTOBUF)])
def test_records_of_a_format_go_there_and_back(
    name: str, program: str, with_jars: Callable[..., Driver], tmp_path: Path
) -> None:
    from pyarrow import parquet

    driver = with_jars(name, program)
    if name == "protobuf":
        (tmp_path / "orders" / "payment.desc").write_bytes(payment_descriptor())
    driver.start()
    driver.wait()
    rows = parquet.read_table(tmp_path / "orders" / name).to_pylist()
    assert sorted((row["shop"], row["cents"]) for row in rows) == [("books", 1200), ("bread", 300)]


def payment_descriptor() -> bytes:
    """What protoc makes of the message in the program's comment."""
    descriptor = pytest.importorskip("google.protobuf.descriptor_pb2")
    files = descriptor.FileDescriptorSet()
    file = files.file.add(name="payment.proto", syntax="proto3")
    message = file.message_type.add(name="Payment")
    kinds = {"shop": descriptor.FieldDescriptorProto.TYPE_STRING, "cents": descriptor.FieldDescriptorProto.TYPE_INT64}
    for number, (name, kind) in enumerate(kinds.items(), 1):
        message.field.add(name=name, number=number, type=kind, label=descriptor.FieldDescriptorProto.LABEL_OPTIONAL)
    text: bytes = files.SerializeToString()
    return text


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
