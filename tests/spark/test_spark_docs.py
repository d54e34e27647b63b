"""docs/spark.md, its examples and the README: their programs run as they stand, their tables are what the code says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyarrow import parquet
from support.spark import SECRET, UNREACHABLE, Driver
from support.spark_sink import all_of

from nsq_fast import NsqdHTTPClient, Producer
from nsq_fast.broker import BrokerProcess
from nsq_fast.errors import ConfigError
from nsq_fast.spark.options import DEFAULT_COLUMNS, SINK, SOURCE, SinkOptions, SourceOptions, table
from nsq_fast.spark.source import spark_schema

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text()
EXAMPLES = (ROOT / "docs" / "spark-examples.md").read_text()
README = (ROOT / "README.md").read_text()
TEXTS = {f"order {number}" for number in range(50)}
PAYMENTS = [b'{"shop": "s%d", "cents": %d}' % (number % 2, number) for number in range(50)] + [b"no JSON"]


def programs(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def tables(name: str) -> list[list[list[str]]]:
    """The tables between the marks of this name: rows of cells, without their heads."""
    part = PAGE.partition(f"<!-- {name}:begin")[2].partition(f"<!-- {name}:end")[0]
    found = []
    for each in part.split("\n\n"):
        lines = [line for line in each.splitlines() if line.startswith("|")]
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]])
    return [rows for rows in found if rows]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_schema_is_as_the_table_says() -> None:
    (rows,) = tables("schema")
    assert [(code(name)[0], kind) for name, kind, _ in rows] == [
        (field.name, field.dataType.simpleString()) for field in spark_schema()
    ]


def test_the_options_are_those_of_the_tables() -> None:
    """Where this fails, put the text of ``table`` in place of the rows."""
    for options in (SOURCE, SINK):
        assert table(options) in PAGE
    assert [len(rows) - 1 for rows in tables("options")] == [len(SOURCE), len(SINK)]


def test_defaults_are_as_the_tables_say() -> None:
    given = {"topic": "t", "channel": "c", "lookupd_http_addresses": "127.0.0.1:4161"}
    source, sink = SourceOptions.parse(given), SinkOptions.parse({"nsqd_tcp_addresses": "127.0.0.1:4150"})
    for defaults, options in ((source, SOURCE), (sink, SINK)):
        for each in options:
            if each.field and each.parse and re.fullmatch("`[^`]+`", each.default):
                assert each.parse(each.name, each.default.strip("`")) == getattr(defaults, each.field), each.name
            elif each.field and each.default in ("", "none", "the end"):
                assert getattr(defaults, each.field) is None, each.name
    assert "headers" not in source.columns


def test_options_of_the_client_that_are_named_are_taken() -> None:
    needed = {"topic": "t", "lookupd_http_addresses": "127.0.0.1:4161"}
    source_options, sink_options = tables("options")
    for name in code(source_options[-1][2]):
        check_known(SourceOptions, {**needed, "channel": "c", name: "true"})
    for name in code(sink_options[-1][2]):
        check_known(SinkOptions, {**needed, name: "true"})


def check_known(kind: Any, options: dict[str, str]) -> None:
    """An option may be known, and this value of it wrong."""
    reason = ""
    try:
        kind.parse(options)
    except ConfigError as error:
        reason = str(error)
    assert "unknown option" not in reason


# In one JVM, each part in a session of its own, each program in a module of its own.
RUN = """
from pyspark.sql import SparkSession

for part in {parts!r}:
    for text in part:
        exec(compile(text, 'program', 'exec'), {{'__name__': '__main__'}})
    SparkSession.builder.getOrCreate().stop()  # what it registered is not there for the next
"""
PLANS = """
import contextlib, io, json, os
from support.spark_program import GIVEN, arguments, say
from pyspark.sql import SparkSession

builder = SparkSession.builder
for name, value in json.loads(os.environ[GIVEN])["settings"].items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()  # and nothing is registered
given = {**arguments(), "reader": "journalled"}

def explained(frame):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        frame.explain(True)
    return text.getvalue()

def failed(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing"

stream = spark.readStream.format("nsq").options(**given).load()
say("schema", text=stream.schema.simpleString())
say("plan", text=explained(stream))
query = lambda: stream.writeStream.format("noop").option("checkpointLocation", "checkpoint").start().awaitTermination()
say("query", text=failed(query))
batch = spark.read.format("nsq").options(**given).option("consume", "true")
say("batch", text=failed(lambda: batch.load().count()))
say("load", text=failed(lambda: batch.option("nsq.snappy", "x").load()))
unreachable = spark.read.format("nsq").options(**arguments()).load()
say("unreachable", text=failed(unreachable.count))
write = spark.range(3).selectExpr("cast(id as string) body").write.format("nsq").mode("append")
sink = {key: value for key, value in arguments().items() if key not in ("channel", "nsqd_http_addresses")}
say("write", text=failed(lambda: write.options(**sink).option("nsq.publish_timeout", "1").save()))
"""
"""What a query whose options have secrets says of them, where nobody has registered the format."""
SUMS, STATE, BATCH = programs(EXAMPLES)[:3]
LISTENER = programs((ROOT / "docs" / "spark-operations.md").read_text())[0]
PARTS = {"docs": [*programs(PAGE)[:2], SUMS, STATE, BATCH], "README": programs(README)[2:]}
CHANNELS = {"orders": ("spark", "reports"), "payments": ("spark", "totals")}


class Part(NamedTuple):
    """Where the servers of a part are, and the files of its programs."""

    lookupd: str
    folder: Path


class Ran(NamedTuple):
    """What has run, with the folder in which Spark keeps what happens to the last program."""

    parts: dict[str, Part]
    driver: Driver
    events: Path


@pytest.fixture(scope="module")
def ran(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Orders and payments were published for each part, and then the programs of all parts ran."""
    found, texts = {}, []
    with ExitStack() as stack:
        for part, of_it in PARTS.items():
            assert all("127.0.0.1:4161" in program for program in of_it)
            folder = tmp_path_factory.mktemp(part)
            (folder / "orders").mkdir()
            broker = stack.enter_context(BrokerProcess())
            lookupd = str(broker.lookupd.http)
            with NsqdHTTPClient(*broker.nsqd.http) as client:
                for topic, channels in CHANNELS.items():
                    client.create_topic(topic)
                    for channel in channels:
                        client.create_channel(topic, channel)
            found[part] = Part(lookupd, folder / "orders")
            with Producer(lookupd_http_addresses=lookupd) as producer:
                producer.multipublish("orders", [text.encode() for text in sorted(TEXTS)])
                producer.multipublish("payments", PAYMENTS)
            texts.append([each.replace("127.0.0.1:4161", lookupd).replace("/var/lib", str(folder)) for each in of_it])
        texts[0].insert(0, LISTENER.replace("9151", "0"))  # it hears of the programs behind it
        events = tmp_path_factory.mktemp("events")
        settings = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": str(events),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }
        program, folder = RUN.format(parts=[*texts, [PLANS]]), tmp_path_factory.mktemp("spark")
        driver = stack.enter_context(Driver(program, folder, settings=settings, **UNREACHABLE))
        driver.wait()
        yield Ran(found, driver, events)


@pytest.fixture
def parts(ran: Ran) -> dict[str, Part]:
    return ran.parts


@pytest.mark.parametrize("part", list(PARTS))
def test_the_programs_bring_orders_into_a_table_and_back(part: str, parts: dict[str, Part]) -> None:
    found = all_of("loud_orders", "reader", parts[part].lookupd, len(TEXTS))
    assert {body.decode() for body in found} == {text.upper() for text in TEXTS}


def test_payments_are_added_up_by_minute_and_shop(parts: dict[str, Part]) -> None:
    counts: Counter[str | None] = Counter()
    cents: Counter[str | None] = Counter()
    for row in parquet.read_table(parts["docs"].folder / "payments").to_pylist():
        counts[row["shop"]] += row["payments"]
        cents[row["shop"]] += row["cents"] or 0
    assert counts == {"s0": 25, "s1": 25, None: 1}
    assert cents == {"s0": 600, "s1": 625, None: 0}


def test_a_state_has_the_sum_of_each_shop(parts: dict[str, Part]) -> None:
    rows = parquet.read_table(parts["docs"].folder / "totals").to_pylist()
    assert {row["shop"]: row["cents"] for row in rows} == {"s0": 600, "s1": 625}


def test_a_batch_as_3_5_reads_it(parts: dict[str, Part]) -> None:
    assert set(parquet.read_table(parts["docs"].folder / "report")["text"].to_pylist()) == TEXTS


def test_secrets_are_nowhere_and_the_format_is_found_by_itself(ran: Ran) -> None:
    whats = ("schema", "plan", "query", "batch", "load", "unreachable", "write")
    said = {what: ran.driver.said(what)[0]["text"] for what in whats}
    assert said["schema"] == spark_schema(DEFAULT_COLUMNS).simpleString()
    assert "nsq.auth_secret=*********(redacted)" in said["plan"]
    assert "ConfigError: journal: is required by the journalled reader" in said["query"].splitlines()[0]
    assert "ConfigError: journal: is required by the journalled reader" in said["batch"]
    assert "AnalysisException" in said["load"]
    assert "ConfigError: nsq.snappy='x': must be true or false" in said["load"]
    assert "127.0.0.1:1" in said["unreachable"]
    assert said["write"] != "nothing"
    written = [path.read_text(errors="replace") for path in ran.events.rglob("*") if path.is_file()]
    assert any("nsq" in text for text in written)
    assert not [text for text in (*said.values(), ran.driver.log(None), *written) if SECRET in text]
