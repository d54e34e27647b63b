"""docs/spark.md and the README: their programs run as they stand, their tables are what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.spark_driver import Driver
from support.waiting import until

from nsq_fast import Consumer, Producer
from nsq_fast.broker import BrokerProcess
from nsq_fast.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text()
README = (ROOT / "README.md").read_text()
TEXTS = {f"order {number}" for number in range(50)}


def programs(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def tables(name: str) -> list[list[list[str]]]:
    """The tables between the marks of this name: rows of cells, without their heads."""
    part = PAGE.partition(f"<!-- {name}:begin")[2].partition(f"<!-- {name}:end")[0]
    found = []
    for table in part.split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]])
    return [table for table in found if table]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_schema_is_as_the_table_says(java: None) -> None:
    from nsq_fast.spark.schema import spark_schema

    (table,) = tables("schema")
    assert [(code(name)[0], kind) for name, kind, _ in table] == [
        (field.name, field.dataType.simpleString()) for field in spark_schema()
    ]


def test_the_options_are_those_of_the_tables() -> None:
    """Where this fails, put the text of ``table`` in place of the rows."""
    from nsq_fast.spark.options import SINK, SOURCE, table

    for options in (SOURCE, SINK):
        assert table(options) in PAGE
    assert [len(rows) - 1 for rows in tables("options")] == [len(SOURCE), len(SINK)]


def test_defaults_are_as_the_tables_say() -> None:
    from nsq_fast.spark.options import SINK, SOURCE, SinkOptions, SourceOptions

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
    from nsq_fast.spark.options import SinkOptions, SourceOptions

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
PARTS = {"docs": programs(PAGE)[:2], "README": programs(README)[2:]}


@pytest.fixture(scope="module")
def lookupds(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the servers of each part are: orders were published there, and then the programs of all parts ran."""
    found, texts = {}, []
    with ExitStack() as stack:
        for part, of_it in PARTS.items():
            assert all("127.0.0.1:4161" in program for program in of_it)
            folder = tmp_path_factory.mktemp(part)
            (folder / "orders").mkdir()
            lookupd = found[part] = str(stack.enter_context(BrokerProcess()).lookupd.http)
            with Producer(lookupd_http_addresses=lookupd) as producer:
                producer.multipublish("orders", [text.encode() for text in sorted(TEXTS)])
            texts.append([each.replace("127.0.0.1:4161", lookupd).replace("/var/lib", str(folder)) for each in of_it])
        driver = stack.enter_context(Driver(RUN.format(parts=texts), tmp_path_factory.mktemp("spark")))
        driver.wait()
        yield found


def bodies_of(topic: str, lookupd: str, count: int) -> set[str]:
    found: list[str] = []
    consumer = Consumer(
        topic,
        "reader",
        lookupd_http_addresses=lookupd,
        message_handler=lambda _, message: found.append(message.body.decode()),
        max_in_flight=100,
    )
    consumer.start(block=False)
    until(lambda: len(found) >= count)
    consumer.close()
    consumer.join()
    return set(found)


@pytest.mark.parametrize("part", list(PARTS))
def test_the_programs_bring_orders_into_a_table_and_back(part: str, lookupds: dict[str, str]) -> None:
    assert bodies_of("loud_orders", lookupds[part], len(TEXTS)) == {text.upper() for text in TEXTS}
