"""Options of source and sink, where they find servers, and which lakes rows go to."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from support import spark_lakes
from support.cluster import Standalone
from support.spark import ROOT, SECRET, Driver, spark_environment, spark_settings
from support.spark_marks import LIMIT
from support.waiting import PROCESS

import nsq_fast
from nsq_fast import Producer
from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader, Columns
from nsq_fast.broker import Broker, BrokerProcess, RedesignedCluster
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.spark.arrow_rows import arrow_schema, to_batch
from nsq_fast.spark.discovery import discover, in_cluster
from nsq_fast.spark.options import HEADERS_AS, NAMES, SinkOptions, SourceOptions, of_topic
from nsq_fast.spark.source import check_load, check_use, choose, spark_schema

# Options as Spark passes them: what they become, what is refused and how it says so, what is never shown.


NEEDED = {"topic": "t", "channel": "c", "nsqd_tcp_addresses": "a,b:5150", "nsqd_http_addresses": "a,https://b:5151"}


def lowered(options: dict[str, str | None]) -> dict[str, str]:
    """As Spark hands them over; None: without it."""
    return {name.lower(): value for name, value in options.items() if value is not None}


def source(**options: str | None) -> SourceOptions:
    """The options that are needed, and these."""
    return SourceOptions.parse(lowered({**NEEDED, **options}))


def sink(**options: str | None) -> SinkOptions:
    return SinkOptions.parse(lowered({"nsqd_tcp_addresses": "a", **options}))


def refusal(kind: Any, options: dict[str, str | None]) -> str:
    with pytest.raises(ConfigError) as failure:
        kind(**options)
    text = str(failure.value)
    assert SECRET not in text
    assert "\n" not in text
    return text


def test_what_is_left_out_has_its_default() -> None:
    options = source()
    assert (options.topic, options.topics, options.channel) == ("t", ("t",), "c")
    assert options.servers.nsqd_tcp == (Address("a", 4150), Address("b", 5150))
    assert options.servers.nsqd_http == (Endpoint("http", Address("a", 4151)), Endpoint("https", Address("b", 5151)))
    assert options.connection.user_agent.endswith("spark")


def test_what_is_given() -> None:
    options = source(
        startingTimestamp="1700000000000",
        maxOffsetsPerTrigger="5000",
        minPartitions="4",
        failOnDataLoss="FALSE",
        includeHeaders="true",
        reader="Replayable",
        suppressDuplicates="false",
    )
    assert options.starting_timestamp == 1_700_000_000_000
    assert (options.max_offsets_per_trigger, options.min_partitions) == (5000, 4)
    assert (options.fail_on_data_loss, options.suppress_duplicates) == (False, False)
    assert (options.columns, options.reader) == (("timestamp", "body", "topic", "attempts", "headers"), "replayable")
    assert {"startingTimestamp", "minPartitions", "reader", "topic", "nsqd_tcp_addresses"} <= options.given


def test_names_go_with_and_without_underscores_and_capitals() -> None:
    options = SourceOptions.parse(
        {"topic": "t", "channel": "c", "lookupdHttpAddresses": "l", "starting_offsets": "latest", "nsq.msgTimeout": "9"}
    )
    assert options.servers.lookupd_http == (Endpoint("http", Address("l", 4161)),)
    assert (options.starting_offsets, options.connection.msg_timeout) == ("latest", 9.0)
    assert {"startingOffsets", "nsq.msg_timeout"} <= options.given


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", "earliest"),
        ("LATEST", "latest"),
        ('{"0": 1234, "5": -1}', {0: 1234, 5: -1}),
        ('{"t": {"0": 5}, "u": {"1": -2}}', {"t": {0: 5}, "u": {1: -2}}),
    ],
)
def test_positions(text: str, expected: Any) -> None:
    assert source(startingOffsets=text).starting_offsets == expected
    assert source(endingOffsets=text).ending_offsets == expected


def test_positions_of_a_topic() -> None:
    assert source(startingOffsetsByTimestamp='{"t": {"0": 5}}').starting_times == {"t": {0: 5}}
    assert of_topic("x", {"t": {0: 5}}, "t") == of_topic("x", {0: 5}, "t") == {0: 5}
    with pytest.raises(ConfigError, match="startingOffsets: names the topics a, b, and not 't'"):
        of_topic("startingOffsets", {"b": {0: 5}, "a": {0: 6}}, "t")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15m", 900.0), ("30s", 30.0), ("500ms", 0.5), ("1500", 1.5), ("2 h", 7200.0), ("1d", 86400.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert source(maxTriggerDelay=text).max_trigger_delay == seconds


def test_columns_in_the_order_given() -> None:
    assert source(columns="body, Topic ,headers").columns == ("body", "topic", "headers")
    assert source(columns="body,headers", includeHeaders="true").columns == ("body", "headers")
    as_map = source(headersAs="MAP", columns="*")
    assert (as_map.headers_as, as_map.columns) == ("map", NAMES)
    assert source(columns=" * ").columns == tuple(name for name in NAMES if name != "headers")
    assert source(columns="*", includeHeaders="true").columns == NAMES
    assert source(headersAs="map", columns="headers,body").columns == ("headers", "body")


def test_topics_are_named_or_match_a_pattern() -> None:
    assert (source(topic="b, a,b").topics, source(topic="b,a").topic) == (("b", "a"), "b,a")
    options = source(topic=None, topicPattern="orders_.*")
    assert (options.topics, options.topic_pattern, options.reads_several) == ((), "orders_.*", True)
    assert options.names_topic("orders_x")
    assert not options.names_topic("my_orders_x")
    one = options.for_topic("orders_x")
    assert (one.topic, one.topics, one.topic_pattern, one.reads_several) == ("orders_x", ("orders_x",), None, False)
    assert source().for_topic("t") == source()


def test_options_of_the_client() -> None:
    options = source(
        **{
            "nsq.snappy": "true",
            "nsq.output_buffer_size": "1024",
            "nsq.lookupd_timeout": "0.5",
            "nsq.ext_filter": '{"type": 1, "filter_ext_key": "k", "filter_data": "v"}',
            "nsq.tls_v1": "true",
            "nsq.tls_cafile": "/ca.pem",
            "nsq.tls_verify": "false",
            "nsq.lookupdTlsCafile": "/l.pem",
        }
    )
    assert (options.connection.snappy, options.connection.output_buffer_size) == (True, 1024)
    assert options.connection.ext_filter == {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    assert options.connection.tls_options == {"cafile": "/ca.pem", "verify": False}
    assert (options.lookup.lookupd_timeout, options.lookup.lookupd_tls_options) == (0.5, {"cafile": "/l.pem"})


def test_secrets_arrive_are_not_shown_and_travel() -> None:
    given = {"nsq.auth_secret": SECRET, "nsq.lookupd_authorization_secret": f"Bearer {SECRET}", "nsq.tls_v1": "true"}
    options = source(startingOffsets='{"0": 5}', **given)
    assert options.connection.auth_secret == SECRET
    assert options.lookup.lookupd_authorization == f"Bearer {SECRET}"
    assert SECRET not in repr(options) + str(options)
    copy = pickle.loads(pickle.dumps(options))
    assert (copy, copy.connection.auth_secret) == (options, SECRET)
    assert sink(**{"nsq.authSecret": SECRET}).connection.auth_secret == SECRET


def test_options_of_the_sink() -> None:
    options = sink(
        **{"topic": "t", "nsq.key_strategy": "hashcode", "nsq.publish_timeout": "3", "traceReceipts": "true"}
    )
    assert (options.topic, options.trace_receipts, options.trace_log, options.traces_all) == ("t", True, None, True)
    assert (options.producer.key_strategy, options.producer.publish_timeout) == ("hashcode", 3.0)
    defaults = sink(checkpointLocation="/c")  # Spark tells it of that
    assert (defaults.topic, defaults.traces_all, defaults.producer.publish_timeout) == (None, False, 60.0)
    assert sink(traceLog="/x").traces_all
    assert sink(reportPath="/r").report_path == "/r"


POSITIONS = ["", "5", "[]", "{}", '{"a": 1}', '{"0": "x"}', '{"0": 1.5}', '{"0": -3}', '{"2000": 1}']

WRONG_VALUES = [
    *(("startingOffsets", text) for text in POSITIONS),
    ("topic", "with space"),
    ("topic", "a,,b"),
    ("channel", ""),
    ("startingTimestamp", "yesterday"),
    ("startingTimestamp", "-1"),
    ("endingTimestamp", "1.5"),
    ("maxOffsetsPerTrigger", "0"),
    ("maxBytesPerTrigger", "0"),
    ("maxTriggerDelay", "soon"),
    ("maxTriggerDelay", "0s"),
    ("startingOffsetsByTimestamp", "5"),
    ("endingOffsetsByTimestamp", '{"t": {"0": -1}}'),
    ("startingOffsetsByTimestampStrategy", "maybe"),
    ("minPartitions", "many"),
    ("failOnDataLoss", "maybe"),
    ("includeHeaders", "1"),
    ("headersAs", "list"),
    ("consume", "yes please"),
    ("columns", "body,unknown"),
    ("columns", "body,body"),
    ("columns", ""),
    ("reader", "kafka"),
    ("orphans", "keep"),
    ("nsqd_tcp_addresses", "a:99999"),
    ("nsqd_tcp_addresses", " , "),
    ("nsqd_http_addresses", "ftp://a"),
    ("nsq.heartbeat_interval", "0"),
    ("nsq.tls_v1", "perhaps"),
    ("nsq.tls_verify", "x"),
    ("nsq.ext_filter", "not json"),
    ("nsq.lookupd_timeout", "soon"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_a_wrong_value_is_named_as_the_user_wrote_it(name: str, value: str) -> None:
    assert refusal(source, {name: value}).startswith(f"{name}=")


REFUSED: list[tuple[dict[str, str | None], str]] = [
    ({"topic": None}, "topic: is required, or topicPattern"),
    ({"channel": None}, "channel: is required"),
    ({"nsqd_tcp_addresses": None}, "lookupd_http_addresses or nsqd_tcp_addresses: one of them is required, neither"),
    ({"lookupd_http_addresses": "l"}, "lookupd_http_addresses or nsqd_tcp_addresses: one of them is required, both"),
    ({"nsqd_http_addresses": "a"}, "nsqd_http_addresses: must name the HTTP ports"),
    ({"starting_offsets": "latest", "startingOffsets": "earliest"}, "startingOffsets: is given twice"),
    ({"topicPattern": "x"}, "topic and topicPattern: only one of them may be given"),
    ({"topic": None, "topicPattern": "("}, "topicPattern='(': no regular expression"),
    ({"columns": "body", "includeHeaders": "true"}, "includeHeaders=true: columns='body' says otherwise"),
    ({"headersAs": "map", "includeHeaders": "false"}, "headersAs: includeHeaders=false says that"),
    ({"headersAs": "map", "columns": "body"}, "headersAs: has no effect, as columns='body' has no headers"),
    ({"checkpointLocation": "/c"}, "unknown option 'checkpointlocation'"),
    ({"tpic": SECRET}, "unknown option 'tpic'; did you mean 'topic'?"),
    ({"startingoffset": SECRET}, "unknown option 'startingoffset'; did you mean 'startingOffsets'?"),
    ({"max_offset_per_trigger": "1"}, "unknown option 'max_offset_per_trigger'; did you mean 'maxOffsetsPerTrigger'?"),
    ({"authsecret": SECRET}, "unknown option 'authsecret'; did you mean 'nsq.auth_secret'?"),
    ({"nsq.auth_secert": SECRET}, "unknown option 'nsq.auth_secert'; did you mean 'nsq.auth_secret'?"),
    ({"nsq.tls_cafil": "x"}, "unknown option 'nsq.tls_cafil'; did you mean 'nsq.tls_cafile'?"),
    ({"nsq.key_strategy": "murmur3"}, "unknown option 'nsq.key_strategy'"),
    ({"subscribe": "1"}, "unknown option 'subscribe', it is Kafka's; here it is topic"),
    ({"subscribePattern": "1"}, "unknown option 'subscribepattern', it is Kafka's; here it is topicPattern"),
    ({"kafka.group.id": "1"}, "unknown option 'kafka.group.id', it is Kafka's; here it is channel"),
    ({"nsq.tls_cafile": "/ca.pem"}, "nsq.tls_options without tls_v1=True: nothing would be encrypted"),
    ({"nsq.snappy": "true", "nsq.deflate": "true"}, "nsq.snappy"),
    ({"nsq.extend_support": "true"}, "nsq.extend_support: leave it out"),
    ({"nsq.auth_secret": SECRET, "nsq.snappy": "x"}, "nsq.snappy='x'"),
    *(
        ({name: SECRET}, f"{name}: Spark would show its value in plans and logs; write {instead}")
        for name, instead in (
            ("nsq.tls_options", "nsq.tls_cafile, nsq.tls_certfile, nsq.tls_keyfile"),
            ("nsq.lookupd_tls_options", "nsq.lookupd_tls_cafile"),
            ("nsq.lookupd_authorization", "nsq.lookupd_authorization_secret, whose value it hides"),
        )
    ),
    ({"nsqd_tcp_addresses": f"http://me:{SECRET}@host"}, "nsqd_tcp_addresses: must hold no user name"),
    ({"nsqd_http_addresses": f"http://me:{SECRET}@host"}, "nsqd_http_addresses: must hold no user name"),
]


def test_what_is_like_no_other_option_has_no_hint() -> None:
    assert refusal(source, {"zzz": "1"}) == "unknown option 'zzz'"
    assert refusal(source, {"nsq.zzz": "1"}) == "unknown option 'nsq.zzz'"


REFUSED_BY_A_SINK: list[tuple[dict[str, str | None], str]] = [
    ({"startingOffsets": "latest"}, "unknown option"),
    *(
        ({name: "x"}, f"unknown option {name!r}: each row says it, in a column {column!r} of the DataFrame")
        for name, column in (
            ("key", "key"),
            ("partition", "partition"),
            ("body", "body"),
            ("tag", "tag"),
            ("headers", "headers"),
            ("trace_id", "trace_id"),
            ("traceid", "trace_id"),
            ("deferms", "defer_ms"),
        )
    ),
    ({"topic": "a b"}, "topic='a b'"),
    ({"nsq.key_strategy": "x"}, "nsq.key_strategy='x'"),
    ({"nsq.tls_cafile": "/ca.pem"}, "nsq.tls_options without tls_v1=True: nothing would be encrypted"),
    ({"nsq.sample_rate": "5"}, "nsq.sample_rate: is for consumers"),
]


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [*((source, *each) for each in REFUSED), *((sink, *each) for each in REFUSED_BY_A_SINK)],
)
def test_what_is_refused(kind: Any, options: dict[str, str | None], text: str) -> None:
    assert refusal(kind, options).startswith(text)


@pytest.mark.parametrize(
    ("options", "is_stream", "text"),
    [
        ({"endingOffsets": "latest"}, True, "endingOffsets: is for spark.read only"),
        ({"endingTimestamp": "1"}, True, "endingTimestamp: is for spark.read only"),
        ({"consume": "true"}, True, "consume: is for spark.read only"),
        ({"maxOffsetsPerTrigger": "5"}, False, "maxOffsetsPerTrigger: is for spark.readStream only"),
        ({"startingOffsets": "latest"}, False, "startingOffsets='latest': there is nothing to read"),
    ],
)
def test_what_is_for_the_other_kind_of_read(options: dict[str, str], is_stream: bool, text: str) -> None:
    check_use(source(**options), is_stream=not is_stream)
    with pytest.raises(ConfigError) as failure:
        check_use(source(**options), is_stream=is_stream)
    assert str(failure.value).startswith(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"startingOffsets": "earliest", "startingTimestamp": "5"}, "startingOffsets and startingTimestamp"),
        ({"endingOffsets": "latest", "endingTimestamp": "5"}, "endingOffsets and endingTimestamp"),
        ({"endingOffsets": "earliest"}, "endingOffsets='earliest'"),
        ({"startingTimestamp": "5", "startingOffsetsByTimestamp": '{"t": {"0": 5}}'}, "startingTimestamp and starting"),
        ({"consume": "true", "maxOffsetsPerTrigger": "5"}, "consume is for spark.read only, maxOffsetsPerTrigger"),
        ({"topic": "a,b", "startingOffsets": '{"0": 5}'}, "startingOffsets: there may be several topics, so each has"),
        ({"maxTriggerDelay": "5s"}, "maxTriggerDelay: has no effect without minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger=9: is more than max"),
        ({"reader": "journalled", "journal": "/j", "maxBytesPerTrigger": "5"}, "maxBytesPerTrigger: the journalled"),
        ({"reader": "replayable", "journal": "/j"}, "journal: the replayable reader cannot honour it: it reads again"),
        ({"reader": "replayable", "suppressDuplicates": "true"}, "suppressDuplicates: the replayable"),
        ({"reader": "replayable", "nsq.sample_rate": "5"}, "nsq.sample_rate: the replayable reader"),
        ({"reader": "replayable", "nsq.desired_tag": "x"}, "nsq.desired_tag: the replayable reader"),
        ({"reader": "journalled", "journal": "/j", "startingOffsets": "latest"}, "startingOffsets: the journalled"),
        ({"reader": "journalled", "endingTimestamp": "5"}, "endingTimestamp: the journalled reader"),
        ({"reader": "journalled", "consume": "true"}, "journal: is required"),
        ({"reader": "journalled", "maxOffsetsPerTrigger": "5"}, "journal: is required"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_load(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as failure:
        check_load(source(**options))
    assert str(failure.value).startswith(named)


T0 = 1_700_000_000_123_456_789

ID = bytes(range(16))

IN_UTC: Any = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}

PLACE: dict[str, Any] = {"topic": "t", "partition": 3, "nsqd": "host:4150", "is_redesigned": True}


def columns(*frames: bytes, ext: bool = True, detail: bool = True) -> Columns:
    return ColumnReader(ext=ext, detail=detail).feed(b"".join(frames))


def full(number: int, ext: bytes = b"{}", version: int = 4) -> bytes:
    options: dict[str, Any] = {"ext_version": version, "ext": ext, "offset": number * 100, "raw_size": 100}
    return encode_message(T0 + number * 1000, number + 1, ID, b"body %d" % number, **options)


def test_the_format_and_its_schema_need_no_arrow() -> None:
    """Spark asks for them in Pythons that read nothing, and importing pyarrow would be half of their CPU."""
    code = "import sys, nsq_fast.spark.source as s; s.spark_schema(); sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PROCESS, check=False).returncode == 0


def test_the_two_schemas_are_the_same() -> None:
    assert tuple(arrow_schema().names) == NAMES == tuple(spark_schema().names)
    assert to_arrow_schema(spark_schema(), **IN_UTC) == arrow_schema()
    assert from_arrow_schema(arrow_schema()) == spark_schema()
    for headers_as in HEADERS_AS:
        assert to_arrow_schema(spark_schema(headers_as=headers_as), **IN_UTC) == arrow_schema(headers_as=headers_as)
    assert spark_schema(("body", "topic")).simpleString() == "struct<body:binary,topic:string>"


def test_a_row_of_a_redesigned_server() -> None:
    batch = to_batch(columns(full(7, b'{"k":"v"}')), **PLACE)
    assert batch.schema == arrow_schema()
    batch.validate(full=True)
    (row,) = batch.to_pylist()
    assert row == {
        "topic": "t",
        "partition": 3,
        "message_id": ID,
        "internal_id": int.from_bytes(ID[:8], "big"),
        "trace_id": int.from_bytes(ID[8:], "big"),
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123463, tzinfo=timezone.utc),
        "attempts": 8,
        "offset": 700,
        "size": 100,
        "headers": '{"k":"v"}',
        "body": b"body 7",
        "nsqd": "host:4150",
    }


def test_a_row_of_an_original_server_has_no_more_than_it_says() -> None:
    place = {**PLACE, "partition": None, "is_redesigned": False}
    batch = to_batch(columns(encode_message(T0, 65535, ID, b"x"), ext=False, detail=False), **place)
    batch.validate(full=True)
    (row,) = batch.to_pylist()
    nulls = {name for name, value in row.items() if value is None}
    assert nulls == {"partition", "internal_id", "trace_id", "offset", "size", "headers"}
    assert (row["attempts"], row["message_id"], row["body"]) == (65535, ID, b"x")


@pytest.mark.parametrize(("first", "count"), [(0, 10), (3, 4), (0, 0), (10, 0), (9, None), (0, None)])
def test_a_part_of_the_rows(first: int, count: int | None) -> None:
    whole = columns(*(full(n, b'{"n":%d}' % n, 4) if n % 2 else full(n, b"", 0) for n in range(10)))
    batch = to_batch(whole, first=first, count=count, **PLACE)
    batch.validate(full=True)
    end = 10 if count is None else first + count
    assert batch.column("body").to_pylist() == [b"body %d" % n for n in range(first, end)]
    assert batch.column("message_id").to_pylist() == [ID] * (end - first)
    assert batch.column("offset").to_pylist() == [n * 100 for n in range(first, end)]
    assert batch.column("headers").to_pylist() == [f'{{"n":{n}}}' if n % 2 else None for n in range(first, end)]
    assert [each.microsecond - 123456 for each in batch.column("timestamp").to_pylist()] == [*range(first, end)]


def test_headers_are_null_where_there_is_no_json() -> None:
    batch = to_batch(
        columns(full(0, b"", 0), full(1, b"a-tag", 2), full(2, b"{}"), full(3, b"")), ("headers",), **PLACE
    )
    assert batch.column(0).to_pylist() == [None, None, "{}", ""]
    only_json = to_batch(columns(full(1, b'{"a":1}'), full(2, '{"ä":1}'.encode())), ("headers",), **PLACE)
    assert only_json.column(0).to_pylist() == ['{"a":1}', '{"ä":1}']


def test_a_header_that_is_no_text_is_made_one() -> None:
    batch = to_batch(columns(full(1, b'{"a":"\xff"}'), full(2)), ("headers",), **PLACE)
    batch.validate(full=True)
    assert batch.column(0).to_pylist() == ['{"a":"\ufffd"}', "{}"]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (b'{"k":"v","\\u00e4":"\xc3\xb6 \\n"}', [("k", "v"), ("ä", "ö \n")]),
        (b'{"number":1.50,"yes":true,"list":[1, "2"]}', [("number", "1.50"), ("yes", "true"), ("list", '[1, "2"]')]),
        (b'{"none":null}', [("none", None)]),
        (b'{"twice":"1","twice":"2"}', [("twice", "2")]),
        (b"{}", []),
        (b"", None),
        (b"[1]", None),
        (b'{"k":"v"', None),
        (b'{"k":"\\ud800"}', None),
        (b'{"k":"\xff"}', [("k", "\ufffd")]),
    ],
)
def test_headers_as_a_map(text: bytes, entries: Any) -> None:
    messages = columns(full(0, b'{"a":"b"}'), full(1, text), full(2, b"a-tag", 2), full(3, text))
    batch = to_batch(messages, ("body", "headers"), "map", **PLACE)
    batch.validate(full=True)
    assert batch.schema == arrow_schema(("body", "headers"), "map")
    assert batch.column("headers").to_pylist() == [[("a", "b")], entries, None, entries]
    as_with_kafka = to_batch(messages, ("headers",), "array", **PLACE).column(0)
    as_with_kafka.validate(full=True)
    pairs = entries and [{"key": key, "value": value and value.encode()} for key, value in entries]
    assert as_with_kafka.to_pylist() == [[{"key": "a", "value": b"b"}], pairs, None, pairs]


def test_a_header_that_is_nested_deeply_is_null_where_python_cannot_read_it() -> None:
    deep = "[" * 30_000 + "]" * 30_000
    message = columns(full(1, f'{{"k":{deep}}}'.encode()))
    for headers_as, read in (("map", [("k", deep)]), ("array", [{"key": "k", "value": deep.encode()}])):
        (found,) = to_batch(message, ("headers",), headers_as, **PLACE).column(0).to_pylist()
        assert found in (None, read)


def test_headers_as_a_map_where_no_message_can_have_any() -> None:
    frames = columns(encode_message(T0, 1, ID, b"x"), ext=False, detail=False)
    batch = to_batch(frames, ("headers",), "map", **PLACE)
    assert batch.column(0).to_pylist() == [None]


def test_bodies_and_ids_are_not_copied() -> None:
    source = columns(*(full(n) for n in range(100)))
    batch = to_batch(source, **PLACE)
    for name, column in (("body", source.body), ("message_id", source.ids)):
        assert batch.column(name).buffers()[2].address == pa.py_buffer(column).address
    assert batch.column("offset").buffers()[1].address == pa.py_buffer(source.offsets).address


@pytest.mark.parametrize("size", [1, 2, 3, 1023, 1024, 1025])
def test_what_is_the_same_in_each_row(size: int) -> None:
    batch = to_batch(columns(*(full(n) for n in range(size))), ("topic", "partition", "nsqd"), **PLACE)
    batch.validate(full=True)
    assert batch.to_pydict() == {"topic": ["t"] * size, "partition": [3] * size, "nsqd": ["host:4150"] * size}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert pa.ipc.open_stream(sink.getvalue()).read_all().to_batches() == [batch]


# The servers of a topic, found through lookup services and nsqds of both families; which reader that gives.


def options_of(*, lookupds: Any = (), nsqds: Any = (), **others: str) -> SourceOptions:
    """Options that name servers by their parts of a broker."""
    servers = {"lookupd_http_addresses": ",".join(str(each.http_address) for each in lookupds)} if lookupds else {}
    if nsqds:
        servers["nsqd_tcp_addresses"] = ",".join(str(each.tcp_address) for each in nsqds)
        servers["nsqd_http_addresses"] = ",".join(str(each.http_address) for each in nsqds)
    return SourceOptions.parse({"topic": "t", "channel": "c", **servers, **others})


@pytest.fixture
def two_nsqds() -> Iterator[Broker]:
    with Broker(nsqds=2) as two_nsqds:
        yield two_nsqds


@pytest.fixture
def three_nodes() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(nodes=3, lookupds=2, kind=True) as three_nodes:
        three_nodes.create_topic("t", partitions=3, replicas=1, channels=["c"], ext=True)
        yield three_nodes


def test_a_lookup_service_that_is_away_is_asked_again(two_nsqds: Broker) -> None:
    with nsq_fast.NsqdHTTPClient(*two_nsqds.nsqds[0].http_address) as client:
        client.create_topic("t")
    options = options_of(lookupds=[two_nsqds.lookupd])
    gevent.sleep(0.05)  # sleep: the lookupd learns of the topic
    two_nsqds.lookupd.stop()
    back = gevent.spawn_later(0.6, two_nsqds.lookupd.start)
    start = time.monotonic()
    discover(options)
    assert time.monotonic() - start > 0.3
    back.join()


def test_a_lookup_service_that_is_away_is_passed_over(
    three_nodes: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    away = three_nodes.lookupds[0]
    away.stop()
    assert len(discover(options_of(lookupds=three_nodes.lookupds)).leaders) == 3
    assert re.search(rf"lookup services that fail are passed over: .*{away.http_address}", caplog.text)


@pytest.mark.parametrize("family", ["original", "redesigned"])
def test_one_nsqd_that_is_away_hides_no_other(two_nsqds: Broker, three_nodes: RedesignedCluster, family: str) -> None:
    nsqds = two_nsqds.nsqds if family == "original" else three_nodes.nsqds
    options = options_of(nsqds=nsqds)
    away = nsqds[0].tcp_address
    nsqds[0].stop()
    servers = discover(options, timeout=1.0)
    assert [nsqd.tcp for nsqd in servers.nsqds] == [nsqd.tcp_address for nsqd in nsqds]
    assert servers.is_redesigned == (family == "redesigned")
    assert away not in {nsqd.tcp for nsqd in servers.leaders.values()}
    assert len(servers.leaders) == (0 if family == "original" else 2)
    assert in_cluster(options, servers) == (family == "redesigned")


def test_which_reader(two_nsqds: Broker, three_nodes: RedesignedCluster) -> None:
    original, redesigned = {"nsqds": two_nsqds.nsqds}, {"lookupds": three_nodes.lookupds}
    with nsq_fast.NsqdHTTPClient(*two_nsqds.nsqds[0].http_address) as client:
        client.create_topic("t")
    assert choose(options_of(**redesigned), is_stream=True) == "replayable"
    assert choose(options_of(**redesigned), is_stream=False) == "replayable"
    assert choose(options_of(nsqds=three_nodes.nsqds), is_stream=True) == "replayable"
    assert choose(options_of(**redesigned, startingOffsets='{"0": 5}'), is_stream=True) == "replayable"
    assert choose(options_of(**redesigned, journal="/j"), is_stream=True) == "journalled"
    assert choose(options_of(**original, journal="/j"), is_stream=True) == "journalled"
    assert choose(options_of(**original), is_stream=False) == "journalled"
    for more in ({}, {"reader": "journalled"}):
        with pytest.raises(ConfigError, match="journal: is required by the journalled reader: a folder"):
            choose(options_of(**original, **more), is_stream=True)
    with pytest.raises(ConfigError, match="journal: is required"):
        choose(options_of(**original, consume="true"), is_stream=False)
    with pytest.raises(ConfigError, match="startingOffsets: the journalled reader cannot"):
        choose(options_of(**original, journal="/j", startingOffsets="earliest"), is_stream=True)


def test_a_redesigned_nsqd_without_a_cluster_gets_a_journal(standalone_nsqd: Standalone) -> None:
    standalone_nsqd.create_topic("t")
    lookup = SimpleNamespace(http_address=standalone_nsqd.lookupd_address)
    for options in (options_of(lookupds=[lookup]), options_of(nsqds=[standalone_nsqd])):
        servers = discover(options)
        assert servers.is_redesigned
        assert {number: nsqd.tcp for number, nsqd in servers.leaders.items()} == {0: standalone_nsqd.tcp_address}
        assert not in_cluster(options, servers)
        assert choose(options, is_stream=False) == "journalled"


def test_a_reader_that_is_asked_for_needs_no_server() -> None:
    nowhere = {"lookupd_http_addresses": "127.0.0.1:1"}
    options = SourceOptions.parse({"topic": "t", "channel": "c", "reader": "replayable", **nowhere})
    assert choose(options, is_stream=True) == "replayable"


# Programs of docs/spark-examples.md that need jars or a command: formats, tables whose batch runs again, pipelines.


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
def lake_broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as running:
        yield running


def publish(lake_broker: BrokerProcess, count: int, name: str) -> list[str]:
    texts = [f"{name}{number}" for number in range(count)]
    with Producer(lookupd_http_addresses=str(lake_broker.lookupd.http)) as producer:
        producer.multipublish("orders", [text.encode() for text in texts])
    return texts


def here(program: str, lake_broker: BrokerProcess, folder: Path) -> str:
    """A program of the page, with the places of this test."""
    assert "127.0.0.1:4161" in program
    return program.replace("127.0.0.1:4161", str(lake_broker.lookupd.http)).replace("/var/lib", str(folder))


@pytest.fixture
def with_jars(spark_driver: Callable[..., Driver], lake_broker: BrokerProcess, tmp_path: Path) -> Callable[..., Driver]:
    """A driver of a program of the page, with the jars of this name."""

    def make(name: str, program: str) -> Driver:
        jars, reason = spark_lakes.jars(name)
        if reason:
            pytest.skip(reason)
        (tmp_path / "orders").mkdir()
        settings = {**spark_settings("local[2]", tmp_path), "spark.jars": ",".join(map(str, jars))}
        del settings["spark.sql.codegen.factoryMode"]  # their own expressions have to be compiled
        return spark_driver(RUN, text=here(program, lake_broker, tmp_path), submit=submitted(settings))

    return make


def submitted(settings: dict[str, str]) -> str:
    """Settings of a Spark that a program or a command starts, without a file of them: see ``quick_environment``."""
    conf = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    return shlex.join([*conf, "pyspark-shell"])


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
    lake: str, program: str, lake_broker: BrokerProcess, with_jars: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = with_jars(lake, program)
    texts = publish(lake_broker, 50, "first")
    assert rows_of(driver) == sorted(texts)
    lose_commit(tmp_path, 0)
    assert rows_of(driver) == sorted(texts)
    texts += publish(lake_broker, 10, "second")
    assert rows_of(driver) == sorted(texts)


@pytest.mark.parametrize(("lake", "program"), [("delta", DELTA_MERGE), ("iceberg", MERGE)])
def test_a_merge_keeps_the_latest_of_each_order(
    lake: str, program: str, lake_broker: BrokerProcess, with_jars: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = with_jars(lake, program)
    with Producer(lookupd_http_addresses=str(lake_broker.lookupd.http)) as producer:
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


def test_a_declarative_pipeline_reads_what_there_is(java: None, lake_broker: BrokerProcess, tmp_path: Path) -> None:
    pytest.importorskip("pyspark.pipelines", reason="PySpark has declarative pipelines from 4.1 on")
    pytest.importorskip("yaml", reason="pyspark[pipelines] is not installed")
    from pyarrow import parquet

    (tmp_path / "orders").mkdir()
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(here(PIPELINE, lake_broker, tmp_path))
    (tmp_path / "spark-pipeline.yml").write_text(
        f"name: orders\nstorage: file://{tmp_path}/storage\nlibraries:\n  - glob:\n      include: transformations/**\n"
    )
    texts = publish(lake_broker, 50, "order")
    run_pipeline(tmp_path)
    found = parquet.read_table(tmp_path / "warehouse" / "orders", columns=["body"])["body"].to_pylist()
    assert sorted(body.decode() for body in found) == sorted(texts)
    sizes = parquet.read_table(tmp_path / "warehouse" / "sizes").to_pylist()
    assert sum(row["count"] for row in sizes) == len(texts)


def run_pipeline(folder: Path) -> None:
    settings = spark_settings("local[2]", folder)
    del settings["spark.master"]  # the command makes its own server
    environment = {**spark_environment(), "PYSPARK_SUBMIT_ARGS": submitted(settings)}
    environment["SPARK_TESTING"] = "1"  # with it the server takes a port that is free
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [str(Path(sys.executable).with_name("spark-pipelines")), "run", "--spec", "spark-pipeline.yml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
