"""Options as Spark passes them: what they become, what is refused and how it says so, what is never shown."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.spark.options import NAMES, SinkOptions, SourceOptions, of_topic
from nsq_fast.spark.source import check_load, check_use

NEEDED = {"topic": "t", "channel": "c", "nsqd_tcp_addresses": "a,b:5150", "nsqd_http_addresses": "a,https://b:5151"}
SECRET = "open-sesame"


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


# What they become


def test_what_is_left_out_has_its_default() -> None:
    options = source()
    assert (options.topic, options.topics, options.channel) == ("t", ("t",), "c")
    assert options.servers.nsqd_tcp == (Address("a", 4150), Address("b", 5150))
    assert options.servers.nsqd_http == (Endpoint("http", Address("a", 4151)), Endpoint("https", Address("b", 5151)))
    assert options.columns == ("timestamp", "body", "topic", "attempts")
    assert (options.reader, options.journal, options.orphans, options.headers_as) == ("auto", None, "adopt", "json")
    assert (options.consume, options.suppress_duplicates, options.fail_on_data_loss) == (False, True, True)
    assert options.starting_offsets is options.starting_timestamp is options.max_offsets_per_trigger is None
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


# What is refused

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
    ({"nsq.tls_cafile": "/ca.pem"}, "nsq.tls_cafile: has no effect without nsq.tls_v1=true"),
    ({"nsq.snappy": "true", "nsq.deflate": "true"}, "nsq.snappy"),
    ({"nsq.extend_support": "true"}, "nsq.extend_support: leave it out"),
    ({"nsq.auth_secret": SECRET, "nsq.snappy": "x"}, "nsq.snappy='x'"),
    (
        {"nsq.tls_options": SECRET},
        "nsq.tls_options: Spark would show its value in plans and logs; write nsq.tls_cafile",
    ),
    ({"nsqd_tcp_addresses": f"http://me:{SECRET}@host"}, "nsqd_tcp_addresses: must hold no user name"),
    ({"nsqd_http_addresses": f"http://me:{SECRET}@host"}, "nsqd_http_addresses: must hold no user name"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_is_refused(options: dict[str, str | None], text: str) -> None:
    assert refusal(source, options).startswith(text)


def test_what_is_like_no_other_option_has_no_hint() -> None:
    assert refusal(source, {"zzz": "1"}) == "unknown option 'zzz'"
    assert refusal(source, {"nsq.zzz": "1"}) == "unknown option 'nsq.zzz'"


def test_a_secret_that_spark_would_show_is_refused_with_the_name_to_use() -> None:
    for name, instead in (
        ("nsq.lookupd_authorization", "nsq.lookupd_authorization_secret"),
        ("nsq.lookupd_tls_options", "nsq.lookupd_tls_keyfile"),
    ):
        text = refusal(source, {name: SECRET})
        assert text.startswith(f"{name}: Spark would show")
        assert instead in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingOffsets": "latest"}, "unknown option"),
        ({"topic": "a b"}, "topic='a b'"),
        ({"nsq.key_strategy": "x"}, "nsq.key_strategy='x'"),
        ({"nsq.tls_cafile": "/ca.pem"}, "nsq.tls_cafile: has no effect without nsq.tls_v1=true"),
        ({"nsq.sample_rate": "5"}, "nsq.sample_rate: is for consumers"),
    ],
)
def test_what_a_sink_refuses(options: dict[str, str | None], text: str) -> None:
    assert refusal(sink, options).startswith(text)


# What goes together


@pytest.mark.parametrize(
    ("options", "is_stream", "text"),
    [
        ({"endingOffsets": "latest"}, True, "endingOffsets: is for spark.read only"),
        ({"endingTimestamp": "1"}, True, "endingTimestamp: is for spark.read only"),
        ({"consume": "true"}, True, "consume: is for spark.read only"),
        ({"maxOffsetsPerTrigger": "5"}, False, "maxOffsetsPerTrigger: is for spark.readStream only"),
        ({"startingOffsets": "latest"}, False, "startingOffsets='latest': there is nothing to read"),
        ({"reader": "journalled"}, True, "journal: is required by the journalled reader: a folder"),
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
