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

SERVERS = {"nsqd_tcp_addresses": "a,b:5150", "nsqd_http_addresses": "a,https://b:5151"}
NEEDED = {"topic": "t", "channel": "c", **SERVERS}
SECRET = "open-sesame"
WITHOUT_HEADERS = tuple(name for name in NAMES if name != "headers")


def lowered(options: dict[str, str]) -> dict[str, str]:
    """As Spark hands them over."""
    return {name.lower(): value for name, value in options.items()}


def source(**options: str | None) -> SourceOptions:
    """The options that are needed, and these; None: without it."""
    return SourceOptions.parse(lowered({key: each for key, each in {**NEEDED, **options}.items() if each is not None}))


def sink(**options: str) -> SinkOptions:
    return SinkOptions.parse(lowered({"nsqd_tcp_addresses": "a", **options}))


def refusal(parse: Any, options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as failure:
        parse(lowered(options))
    return str(failure.value)


def test_what_is_left_out_has_its_default() -> None:
    options = source()
    assert (options.topic, options.channel) == ("t", "c")
    assert options.servers.nsqd_tcp == (Address("a", 4150), Address("b", 5150))
    assert options.servers.nsqd_http == (Endpoint("http", Address("a", 4151)), Endpoint("https", Address("b", 5151)))
    assert options.columns == WITHOUT_HEADERS
    assert (options.reader, options.journal, options.consume, options.suppress_duplicates) == (
        "auto",
        None,
        False,
        True,
    )
    assert options.starting_offsets is options.starting_timestamp is options.max_offsets_per_trigger is None
    assert options.fail_on_data_loss
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
    assert (options.columns, options.reader) == (NAMES, "replayable")
    assert {"startingTimestamp", "minPartitions", "reader", "topic", "nsqd_tcp_addresses"} <= options.given


def test_names_go_with_and_without_underscores_and_capitals() -> None:
    options = SourceOptions.parse(
        {"topic": "t", "channel": "c", "lookupdHttpAddresses": "l", "starting_offsets": "latest", "nsq.msgTimeout": "9"}
    )
    assert options.servers.lookupd_http == (Endpoint("http", Address("l", 4161)),)
    assert options.starting_offsets == "latest"
    assert options.connection.msg_timeout == 9.0
    assert "startingOffsets" in options.given
    assert "nsq.msg_timeout" in options.given
    both = {**NEEDED, "startingoffsets": "latest", "starting_offsets": "earliest"}
    assert "given twice" in refusal(SourceOptions.parse, both)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", "earliest"),
        ("LATEST", "latest"),
        ('{"0": 1234, "5": -1}', {0: 1234, 5: -1}),
        ('{"1": -2}', {1: -2}),
    ],
)
def test_positions(text: str, expected: Any) -> None:
    assert source(startingOffsets=text).starting_offsets == expected
    assert source(endingOffsets=text).ending_offsets == expected


@pytest.mark.parametrize(
    "text", ["", "5", "[]", "{}", '{"a": 1}', '{"0": "x"}', '{"0": 1.5}', '{"0": -3}', '{"2000": 1}']
)
def test_what_is_no_position(text: str) -> None:
    assert refusal(SourceOptions.parse, {**NEEDED, "startingOffsets": text}).startswith(
        f"startingOffsets={text!r}: must"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topic", "with space"),
        ("channel", ""),
        ("startingTimestamp", "yesterday"),
        ("startingTimestamp", "-1"),
        ("endingTimestamp", "1.5"),
        ("maxOffsetsPerTrigger", "0"),
        ("minPartitions", "many"),
        ("failOnDataLoss", "maybe"),
        ("includeHeaders", "1"),
        ("consume", "yes please"),
        ("columns", "body,unknown"),
        ("columns", "body,body"),
        ("columns", ""),
        ("reader", "kafka"),
        ("nsqd_tcp_addresses", "a:99999"),
        ("nsqd_tcp_addresses", " , "),
        ("nsqd_http_addresses", "ftp://a"),
        ("nsq.heartbeat_interval", "0"),
        ("nsq.tls_v1", "perhaps"),
        ("nsq.ext_filter", "not json"),
        ("nsq.lookupd_timeout", "soon"),
    ],
)
def test_a_wrong_value_is_named_as_the_user_wrote_it(name: str, value: str) -> None:
    text = refusal(SourceOptions.parse, {**NEEDED, name: value})
    assert text.startswith(f"{name}=")
    assert "\n" not in text


@pytest.mark.parametrize("name", ["topic", "channel"])
def test_what_is_required(name: str) -> None:
    options = {key: value for key, value in NEEDED.items() if key != name}
    assert refusal(SourceOptions.parse, options).startswith(f"{name}: is required")


def test_servers_are_named_in_one_way() -> None:
    names = {"topic": "t", "channel": "c"}
    assert "neither is given" in refusal(SourceOptions.parse, names)
    assert "both are given" in refusal(SourceOptions.parse, {**NEEDED, "lookupd_http_addresses": "l"})
    text = refusal(SourceOptions.parse, {**names, "nsqd_tcp_addresses": "a,b", "nsqd_http_addresses": "a"})
    assert text.startswith("nsqd_http_addresses: must name the HTTP ports")
    assert "neither is given" in refusal(SourceOptions.parse, {**names, "nsqd_http_addresses": "a"})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tpic", "topic"),
        ("startingoffset", "startingOffsets"),
        ("max_offset_per_trigger", "maxOffsetsPerTrigger"),
        ("nsq.auth_secert", "nsq.auth_secret"),
        ("nsq.tls_cafil", "nsq.tls_cafile"),
        ("authsecret", "nsq.auth_secret"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(key: str, meant: str) -> None:
    text = refusal(SourceOptions.parse, {**NEEDED, key: SECRET})
    assert text == f"unknown option {key!r}; did you mean {meant!r}?"


def test_an_unknown_option_that_is_like_no_other() -> None:
    assert refusal(SourceOptions.parse, {**NEEDED, "zzz": "1"}) == "unknown option 'zzz'"
    assert refusal(SourceOptions.parse, {**NEEDED, "nsq.zzz": "1"}) == "unknown option 'nsq.zzz'"


def test_columns_in_the_order_given() -> None:
    assert source(columns="body, Topic ,headers").columns == ("body", "topic", "headers")
    assert source(columns="body,headers", includeHeaders="true").columns == ("body", "headers")
    text = refusal(SourceOptions.parse, {**NEEDED, "columns": "body", "includeHeaders": "true"})
    assert text.startswith("includeHeaders=true: columns='body'")


def test_headers_as_a_map_is_a_column_that_is_asked_for() -> None:
    assert source().headers_as == "json"
    assert (source(headersAs="MAP").headers_as, source(headersAs="map").columns) == ("map", NAMES)
    assert source(headersAs="map", columns="headers,body").columns == ("headers", "body")
    for given, reason in (
        ({"headersAs": "array"}, "headersAs='array': must be json or map"),
        ({"headersAs": "map", "includeHeaders": "false"}, "headersAs: includeHeaders=false says that"),
        ({"headersAs": "map", "columns": "body"}, "headersAs: has no effect, as columns='body' has no headers"),
    ):
        assert refusal(SourceOptions.parse, {**NEEDED, **given}).startswith(reason)


# Options of the client


def test_options_of_the_client() -> None:
    options = source(
        **{
            "nsq.snappy": "true",
            "nsq.output_buffer_size": "1024",
            "nsq.lookupd_timeout": "0.5",
            "nsq.ext_filter": '{"type": 1, "filter_ext_key": "k", "filter_data": "v"}',
            "nsq.client_id": "me",
        }
    )
    assert (options.connection.snappy, options.connection.output_buffer_size) == (True, 1024)
    assert options.connection.ext_filter == {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    assert (options.connection.client_id, options.lookup.lookupd_timeout) == ("me", 0.5)


def test_options_of_tls_come_in_parts() -> None:
    options = source(
        **{
            "nsq.tls_v1": "true",
            "nsq.tls_cafile": "/ca.pem",
            "nsq.tls_verify": "false",
            "nsq.lookupdTlsCafile": "/l.pem",
        }
    )
    assert options.connection.tls_options == {"cafile": "/ca.pem", "verify": False}
    assert options.lookup.lookupd_tls_options == {"cafile": "/l.pem"}
    assert refusal(SourceOptions.parse, {**NEEDED, "nsq.tls_verify": "x"}).startswith(
        "nsq.tls_verify='x': must be true"
    )


def test_who_names_a_certificate_does_not_get_plain_text() -> None:
    for parse, options in ((SourceOptions.parse, NEEDED), (SinkOptions.parse, {"nsqd_tcp_addresses": "a"})):
        text = refusal(parse, {**options, "nsq.tls_cafile": "/ca.pem"})
        assert text == "nsq.tls_cafile: has no effect without nsq.tls_v1=true"


def test_what_contradicts_itself_in_the_client() -> None:
    text = refusal(SourceOptions.parse, {**NEEDED, "nsq.snappy": "true", "nsq.deflate": "true"})
    assert text.startswith("nsq.snappy")


def test_what_has_no_place() -> None:
    assert refusal(SourceOptions.parse, {**NEEDED, "nsq.extend_support": "true"}).startswith(
        "nsq.extend_support: leave"
    )
    assert refusal(SinkOptions.parse, {"nsqd_tcp_addresses": "a", "nsq.sample_rate": "5"}).startswith("nsq.sample_rate")
    assert refusal(SourceOptions.parse, {**NEEDED, "nsq.key_strategy": "murmur3"}).startswith("unknown option")


# Secrets


def test_secrets_arrive_and_are_not_shown() -> None:
    options = source(**{"nsq.auth_secret": SECRET, "nsq.lookupd_authorization_secret": f"Bearer {SECRET}"})
    assert options.connection.auth_secret == SECRET
    assert options.lookup.lookupd_authorization == f"Bearer {SECRET}"
    assert SECRET not in repr(options)
    assert SECRET not in str(options)
    assert sink(**{"nsq.authSecret": SECRET}).connection.auth_secret == SECRET


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("nsq.lookupd_authorization", "nsq.lookupd_authorization_secret"),
        ("nsq.tls_options", "nsq.tls_cafile"),
        ("nsq.lookupd_tls_options", "nsq.lookupd_tls_keyfile"),
    ],
)
def test_a_secret_that_spark_would_show_is_refused(name: str, instead: str) -> None:
    text = refusal(SourceOptions.parse, {**NEEDED, name: SECRET})
    assert text.startswith(f"{name}: Spark would show")
    assert instead in text
    assert SECRET not in text


@pytest.mark.parametrize("name", ["nsqd_tcp_addresses", "nsqd_http_addresses"])
def test_a_password_in_an_address_is_refused_and_not_shown(name: str) -> None:
    text = refusal(SourceOptions.parse, {**NEEDED, name: f"http://me:{SECRET}@host"})
    assert text.startswith(f"{name}: must hold no user name")
    assert SECRET not in text


@pytest.mark.parametrize("options", [{"nsq.auth_secret": SECRET, "nsq.snappy": "x"}, {"nsq.auth_secert": SECRET}])
def test_no_refusal_shows_a_secret(options: dict[str, str]) -> None:
    assert SECRET not in refusal(SourceOptions.parse, {**NEEDED, **options})


def test_options_are_pickled_with_their_secrets() -> None:
    options = source(
        startingOffsets='{"0": 5}', **{"nsq.auth_secret": SECRET, "nsq.tls_v1": "true", "nsq.tls_cafile": "/x"}
    )
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options
    assert copy.connection.auth_secret == SECRET


# Topics, times and limits


def test_topics_are_named_or_match_a_pattern() -> None:
    assert (source(topic="b, a,b").topics, source(topic="b,a").topic) == (("b", "a"), "b,a")
    assert source().topics == ("t",)
    options = source(topic=None, topicPattern="orders_.*")
    assert (options.topics, options.topic_pattern, options.reads_several) == ((), "orders_.*", True)
    assert options.names_topic("orders_x")
    assert not options.names_topic("my_orders_x")
    one = options.for_topic("orders_x")
    assert (one.topic, one.topics, one.topic_pattern, one.reads_several) == ("orders_x", ("orders_x",), None, False)
    assert source().for_topic("t") == source()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topicPattern": "x"}, "topic and topicPattern: only one of them may be given"),
        ({"topic": None, "topicPattern": "("}, "topicPattern='(': no regular expression"),
        ({"topic": "a,,b"}, "topic='a,,b': invalid topic name"),
        ({"topic": "a,b c"}, "topic='a,b c': invalid topic name"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay='soon': must be a duration as 15m, 30s or 500ms"),
        ({"maxTriggerDelay": "0s"}, "maxTriggerDelay='0s': must be"),
        ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger='0': must be a whole number, at least 1"),
        ({"startingOffsetsByTimestamp": "5"}, "startingOffsetsByTimestamp='5': must be JSON"),
        ({"endingOffsetsByTimestamp": '{"t": {"0": -1}}'}, "endingOffsetsByTimestamp='{"),
        ({"startingOffsetsByTimestampStrategy": "maybe"}, "startingOffsetsByTimestampStrategy='maybe': must be latest"),
    ],
)
def test_topics_times_and_limits_that_cannot_be(options: dict[str, str | None], text: str) -> None:
    given = {key: value for key, value in {**NEEDED, **options}.items() if value is not None}
    assert refusal(SourceOptions.parse, given).startswith(text)


def test_positions_by_topic() -> None:
    assert source(startingOffsets='{"t": {"0": 5}, "u": {"1": -2}}').starting_offsets == {"t": {0: 5}, "u": {1: -2}}
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


# What goes together


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "consume"])
def test_options_of_batches_are_refused_for_streams(name: str) -> None:
    value = {"endingOffsets": "latest", "endingTimestamp": "1", "consume": "true"}[name]
    options = source(**{name: value})
    check_use(options, is_stream=False)
    with pytest.raises(ConfigError, match=rf"{name}: is for spark\.read only"):
        check_use(options, is_stream=True)


def test_options_of_streams_are_refused_for_batches() -> None:
    options = source(maxOffsetsPerTrigger="5")
    check_use(options, is_stream=True)
    with pytest.raises(ConfigError, match=r"maxOffsetsPerTrigger: is for spark\.readStream only"):
        check_use(options, is_stream=False)
    with pytest.raises(ConfigError, match="startingOffsets='latest'"):
        check_use(source(startingOffsets="latest"), is_stream=False)


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


def test_a_stream_needs_a_journal() -> None:
    options = source(reader="journalled")
    check_use(options, is_stream=False)
    with pytest.raises(ConfigError, match=r"journal: is required by the journalled reader: a folder"):
        check_use(options, is_stream=True)


# The sink


def test_options_of_the_sink() -> None:
    options = sink(
        **{"topic": "t", "nsq.key_strategy": "hashcode", "nsq.publish_timeout": "3", "traceReceipts": "true"}
    )
    assert (options.topic, options.trace_receipts, options.trace_log) == ("t", True, None)
    assert (options.producer.key_strategy, options.producer.publish_timeout) == ("hashcode", 3.0)
    assert sink().topic is None


def test_the_sink_is_told_of_the_checkpoint_by_spark() -> None:
    assert sink(checkpointLocation="/c").topic is None
    assert refusal(SourceOptions.parse, {**NEEDED, "checkpointLocation": "/c"}).startswith("unknown option")


def test_a_sink_that_is_given_what_is_for_sources() -> None:
    servers = {"nsqd_tcp_addresses": "a"}
    assert refusal(SinkOptions.parse, {**servers, "startingOffsets": "latest"}).startswith("unknown option")
    assert refusal(SinkOptions.parse, {**servers, "topic": "a b"}).startswith("topic='a b'")
    assert refusal(SinkOptions.parse, {**servers, "nsq.key_strategy": "x"}).startswith("nsq.key_strategy='x'")


@pytest.mark.parametrize(
    ("key", "meant"), [("subscribe", "topic"), ("subscribepattern", "topicPattern"), ("kafka.group.id", "channel")]
)
def test_a_name_of_kafka_s_is_told_what_it_is_here(key: str, meant: str) -> None:
    assert (
        refusal(SourceOptions.parse, {**NEEDED, key: "1"})
        == f"unknown option {key!r}, it is Kafka's; here it is {meant}"
    )
