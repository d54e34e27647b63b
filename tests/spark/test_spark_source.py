"""The format in a real Spark: found by itself, checked at load, its rows as Spark sees them, its secrets nowhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from support.spark_driver import Driver
from support.spark_made_up import MadeUp
from support.spark_settings import ROOT
from support.waiting import PROCESS

import nsq_fast.spark
from nsq_fast.errors import ConfigError
from nsq_fast.spark import NsqDataSource
from nsq_fast.spark.schema import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Drivers = Callable[..., Driver]
SECRET = "open-sesame"
OPTIONS = {
    "topic": "t",
    "channel": "c",
    "nsqd_tcp_addresses": "127.0.0.1:1",
    "nsqd_http_addresses": "127.0.0.1:1",
    "nsq.auth_secret": SECRET,
    "nsq.lookupd_authorization_secret": f"Bearer {SECRET}",
}


def test_rows_as_spark_sees_them(spark: SparkSession) -> None:
    spark.dataSource.register(MadeUp)
    source = spark.read.format(MadeUp.name()).options(
        **OPTIONS, reader="replayable", includeHeaders="true", columns="*"
    )
    frame = source.load()
    readable = frame.selectExpr("*", "decode(body, 'utf-8') text").drop("body", "message_id")
    texts = [row[0] for row in readable.selectExpr("to_json(struct(*))").collect()]
    expected = (
        '{{"topic":"t","partition":5,"internal_id":-1,"trace_id":-1,"timestamp":"2023-11-14T22:13:20.123Z",'
        '"attempts":65535,"offset":700,"size":40,"headers":"{{\\"k\\":\\"v\\"}}","nsqd":"h:1","text":"{}"}}'
    )
    wanted = [expected.format(number) for number in range(3)] + [expected.format(1).replace('"partition":5,', "")]
    assert sorted(texts) == sorted(wanted)
    assert [row[0].hex() for row in frame.select("message_id").collect()] == ["ff" * 16] * 4
    chosen = source.option("columns", "headers,body").load()
    assert (chosen.columns, chosen.count()) == (["headers", "body"], 4)
    as_map = source.option("headersAs", "map").load()
    assert [row[0] for row in as_map.selectExpr("headers['k']").collect()] == ["v"] * 4


# What Spark finds without being told, and what it writes down

PLANS = """
import contextlib, io, os
from support.spark_program import GIVEN, arguments, say
import json
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
spark.stop()
"""


def test_secrets_are_nowhere_and_the_format_is_found_by_itself(spark_driver: Drivers, tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(events),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    driver = spark_driver(PLANS, settings=settings, **OPTIONS)
    driver.start()
    driver.wait()
    said = {what: driver.said(what)[0]["text"] for what in ("schema", "plan", "query", "batch", "load", "write")}
    assert said["schema"] == spark_schema(NsqDataSource(OPTIONS).source_options().columns).simpleString()
    assert "nsq.auth_secret=*********(redacted)" in said["plan"]
    assert "ConfigError: journal: is required by the journalled reader" in said["query"].splitlines()[0]
    assert "ConfigError: journal: is required by the journalled reader" in said["batch"]
    assert "AnalysisException" in said["load"]
    assert "ConfigError: nsq.snappy='x': must be true or false" in said["load"]
    assert "127.0.0.1:1" in driver.said("unreachable")[0]["text"]
    assert said["write"] != "nothing"
    written = [path.read_text(errors="replace") for path in events.rglob("*") if path.is_file()]
    assert any("nsq" in text for text in written)
    texts = [*said.values(), driver.said("unreachable")[0]["text"], driver.log(None), *written]
    assert not [text for text in texts if SECRET in text]


# At load


def load(spark: SparkSession, **options: str) -> Any:
    return spark.readStream.format("nsq").options(**{**OPTIONS, **options}).load()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingoffset": "latest"}, "unknown option 'startingoffset'; did you mean 'startingOffsets'?"),
        ({"reader": "replayable", "journal": "/j"}, "journal: the replayable reader cannot honour it"),
        ({"nsq.lookupd_authorization": SECRET}, "Spark would show its value in plans and logs"),
    ],
)
def test_what_is_wrong_is_said_at_load(spark: SparkSession, options: dict[str, str], text: str) -> None:
    with pytest.raises(AnalysisException) as failure:
        load(spark, **options)
    assert f"ConfigError: {text}" in str(failure.value) or text in str(failure.value)
    assert SECRET not in str(failure.value)


def test_load_asks_no_server(spark: SparkSession) -> None:
    assert load(spark).isStreaming
    assert load(spark, columns="body,attempts").columns == ["body", "attempts"]
    assert spark.read.format("nsq").options(**OPTIONS).load().columns == ["timestamp", "body", "topic", "attempts"]


def test_a_schema_of_the_users_own_must_be_the_sources() -> None:
    source = NsqDataSource({**OPTIONS, "columns": "body,attempts", "reader": "replayable"})
    expected = r"schema struct<topic:string,x:string>: the source gives struct<body:binary,attempts:int>"
    with pytest.raises(ConfigError, match=expected):
        source.reader(spark_schema(("topic",)).add("x", "string"))
    with pytest.raises(ConfigError, match="leave schema"):
        source.streamReader(spark_schema(("attempts", "body")))


# Without the extra

WITHOUT = """
import sys
sys.modules[{missing!r}] = None
import nsq_fast.spark, pyspark_nsq
assert not hasattr(pyspark_nsq, "DefaultSource")
try:
    nsq_fast.spark.register(None)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_the_extra_is_named_where_it_is_missing(missing: str) -> None:
    root = Path(nsq_fast.spark.__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT.format(missing=missing)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, cwd=root, check=False)
    assert "pip install 'nsq-fast[spark]'" in done.stdout, done.stderr


def test_spark_finds_the_format_of_an_editable_install(tmp_path: Path) -> None:
    """It lists modules. The package itself is left out here: it would be compiled."""
    tree, target = tmp_path / "tree", tmp_path / "site"
    (tree / "nsq_fast").mkdir(parents=True)
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pyspark_nsq.py"):
        shutil.copy(ROOT / name, tree)
    (tree / "nsq_fast" / "__init__.py").touch()
    (tree / "setup.py").write_text("from setuptools import setup\nsetup(version='1')\n")
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(target / done.stdout.split()[-1]) as wheel:
        wheel.extractall(target)
    look = f"import pkgutil, site; site.addsitedir({str(target)!r}); print([m.name for m in pkgutil.iter_modules()])"
    found = subprocess.run([sys.executable, "-IS", "-c", look], capture_output=True, text=True, check=True)
    assert "'pyspark_nsq'" in found.stdout
