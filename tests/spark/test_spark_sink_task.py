"""A task of the sink: what it publishes, what it reports, and each row once."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.cluster import Standalone
from support.peers import Peer
from support.publishing import Command, EndOfPeer, PublishNsqd, refuse
from support.servers import RealLookupd, RealNsqd
from support.spark_ledger import account
from support.spark_sink import batch, numbered, taken, write
from support.wire import WireClient

from nsq_fast.broker import Broker
from nsq_fast.broker.redesigned.cluster import RedesignedCluster
from nsq_fast.errors import BadTopic, ConfigError, NoNsqd, RowInvalid, WriteFailed
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER, hashcode_partition, murmur3_partition
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.sink import RECEIPTS, TaskReport, TaskWriter, WriteReport
from nsq_fast.spark.sink.plan import RowKeys, keys_of_batch, keys_of_stream

# One task of a write, without Spark: where rows go, what is refused before it is sent, what is said of failures.


PARTITIONS = 3


@pytest.fixture(scope="module")
def own_broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(nodes=3, kind=True) as running:
        yield running


class OnBroker:
    """A topic of the embedded nsqd, named like its test."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.name = name
        self.address = broker.nsqd.tcp_address
        self.options = {"topic": name, "nsqd_tcp_addresses": str(self.address)}

    def write(self, *batches: pa.RecordBatch, **options: str) -> TaskReport:
        return write(batches, **{**self.options, **options})

    def taken(self, count: int, name: str | None = None) -> list[bytes]:
        return taken(self.address, name or self.name, count)


class OnCluster:
    """A topic of the embedded cluster."""

    def __init__(self, cluster: RedesignedCluster, name: str, partitions: int) -> None:
        self.name = name
        self._cluster, self._partitions = cluster, partitions
        lookupds = ",".join(str(lookupd.http_address) for lookupd in cluster.lookupds)
        self.options = {"topic": name, "lookupd_http_addresses": lookupds, "nsq.lookupd_refresh_interval": "0.05"}

    def write(self, *batches: pa.RecordBatch, **options: str) -> TaskReport:
        return write(batches, **{**self.options, **options})

    def attempt(self, *batches: pa.RecordBatch, of: str = "w", task: int = 0) -> int:
        """Write rows with idempotence keys, as a task of a write; how many."""
        names = {name: name for name in batches[0].schema.names}
        return TaskWriter(SinkOptions.parse(self.options), names, RowKeys(of, task)).write(iter(batches)).rows

    def records(self) -> dict[int, list[Any]]:
        """What each partition has."""
        return {
            number: self._cluster.partition(self.name, number).log.read(0, 1_000_000)
            for number in range(self._partitions)
        }

    def bodies(self) -> list[bytes]:
        return [record.body for log in self.records().values() for record in log]

    def keys(self) -> dict[bytes, list[str]]:
        """Body -> the idempotence keys of the messages that have it, in the order of the log."""
        found: dict[bytes, list[str]] = defaultdict(list)
        for log in self.records().values():
            for record in log:
                found[record.body].append(json.loads(record.ext[3:])[IDEMPOTENCE_HEADER])
        return found


@pytest.fixture
def original(own_broker: Broker, request: pytest.FixtureRequest) -> OnBroker:
    return OnBroker(own_broker, request.node.originalname[:60])


@pytest.fixture
def redesigned(own_cluster: RedesignedCluster, request: pytest.FixtureRequest) -> Callable[..., OnCluster]:
    def make(partitions: int = PARTITIONS, replicas: int = 1, *, name: str = "", **flags: Any) -> OnCluster:
        name = name or request.node.originalname[:60]
        own_cluster.create_topic(name, partitions, replicas, channels=["check"], **flags)
        return OnCluster(own_cluster, name, partitions)

    return make


def test_every_row_of_every_batch_once(original: OnBroker) -> None:
    bodies = numbered(5000)
    batches = [batch(body=bodies[start : start + 700]) for start in range(0, 5000, 700)]
    report = original.write(*batches, batch(body=pa.array([], pa.binary())))
    assert (report.rows, report.places) == (5000, {(original.name, None): 5000})
    account(bodies, original.taken(5000)).check()


def test_a_slice_of_a_batch_and_text_and_large_types(original: OnBroker) -> None:
    whole = batch(body=numbered(100), key=pa.nulls(100, pa.string()))
    texts = batch(body=pa.array(["ä", "b"]), key=pa.nulls(2, pa.string()))
    large = batch(body=pa.array(["c"], pa.large_string()), key=pa.nulls(1, pa.string()))
    assert original.write(whole.slice(10, 20), large, texts).rows == 23
    account([*numbered(20, 10), b"c", "ä".encode(), b"b"], original.taken(23)).check()


def test_no_rows_need_no_server() -> None:
    nothing = batch(body=pa.array([], pa.binary()))
    assert write([nothing], topic="t", nsqd_tcp_addresses="127.0.0.1:1").rows == 0


def test_a_column_names_the_topics_unless_the_option_does(original: OnBroker) -> None:
    names = [f"{original.name}{number}" for number in range(3)]
    rows = batch(body=numbered(30), topic=names * 10)
    servers = {name: value for name, value in original.options.items() if name != "topic"}
    assert write([rows], **servers).places == {(name, None): 10 for name in names}
    assert original.write(rows).places == {(original.name, None): 30}
    for number, name in enumerate(names):
        assert sorted(original.taken(10, name)) == sorted(numbered(30)[number::3])


def test_large_batches_are_cut(original: OnBroker) -> None:
    bodies = [b"%05d" % number + bytes(1000) for number in range(3000)]
    limits = {"nsq.max_body_size": "50000", "nsq.linger_max_messages": "100", "nsq.max_pending": "500"}
    assert original.write(batch(body=bodies), **limits).rows == 3000
    account(bodies, original.taken(3000)).check()


def test_deferred_rows_come_later(original: OnBroker) -> None:
    rows = batch(body=numbered(6), defer_ms=pa.array([None, 0, 600, 600, None, 600], pa.int32()))
    began = time.monotonic()
    assert original.write(rows).rows == 6
    found = original.taken(6)
    assert (sorted(found[:3]), sorted(found[3:])) == ([b"0", b"1", b"4"], [b"2", b"3", b"5"])
    assert time.monotonic() - began > 0.6 + 0.3  # and the look for more


@pytest.mark.parametrize(
    ("strategy", "hashed", "keys"),
    [
        ("murmur3", murmur3_partition, [f"key-{number % 50}" for number in range(2000)]),
        ("murmur3", murmur3_partition, [b"\0\xff%d" % (number % 50) for number in range(2000)]),
        ("hashcode", hashcode_partition, [f"schlüssel-{number % 50}" for number in range(2000)]),
        ("hashcode", hashcode_partition, [number % 50 - 25 for number in range(2000)]),
    ],
    ids=["text", "bytes", "Java text", "Java long"],
)
def test_keys_go_where_a_producer_sends_them_in_order(
    redesigned: Callable[..., OnCluster],
    request: pytest.FixtureRequest,
    strategy: str,
    hashed: Callable[[Any, int], int],
    keys: list[Any],
) -> None:
    topic = redesigned(name=f"keys{abs(hash(request.node.name))}", ordered=True)
    bodies = numbered(2000)
    batches = [batch(body=bodies[at : at + 300], key=keys[at : at + 300]) for at in range(0, 2000, 300)]
    report = topic.write(*batches, **{"nsq.key_strategy": strategy, "nsq.linger_max_messages": "40"})
    assert report.rows == 2000
    for number, log in topic.records().items():
        assert [record.body for record in log] == [
            body for body, key in zip(bodies, keys, strict=True) if hashed(key, PARTITIONS) == number
        ]
        assert report.places.get((topic.name, number), 0) == len(log)


def test_partitions_keys_and_neither_side_by_side(redesigned: Callable[..., OnCluster]) -> None:
    topic = redesigned(ordered=True)
    rows = batch(
        body=numbered(600),
        partition=pa.array([number % 3 if number % 6 < 3 else None for number in range(600)], pa.int32()),
        key=[None if number % 6 < 4 else "key" for number in range(600)],
    )
    assert topic.write(rows).rows == 600
    log = topic.records()
    for number in range(3):
        ours = [body for body in numbered(600) if int(body) % 6 < 3 and int(body) % 3 == number]
        assert [record.body for record in log[number] if int(record.body) % 6 < 3] == ours
    keyed = [record.body for record in log[murmur3_partition("key", 3)] if int(record.body) % 6 > 3]
    assert keyed == [body for body in numbered(600) if int(body) % 6 > 3]
    account(numbered(600), topic.bodies()).check()


def test_rows_without_a_key_take_turns(redesigned: Callable[..., OnCluster]) -> None:
    topic = redesigned(ordered=True)
    report = topic.write(batch(body=numbered(3000)), **{"nsq.linger_max_messages": "100"})
    assert all(500 < report.places[topic.name, number] < 1500 for number in range(PARTITIONS))
    account(numbered(3000), topic.bodies()).check()


def test_receipts_name_the_stored_records(redesigned: Callable[..., OnCluster]) -> None:
    topic = redesigned(ordered=True)
    trace_ids = pa.array([None if number % 4 == 0 else number - 500 for number in range(1000)], pa.int64())
    table = topic.write(batch(body=numbered(1000), trace_id=trace_ids)).receipt_table()
    found = {
        (row["internal_id"], row["trace_id"] % 2**64, row["partition"], row["offset"], row["size"])
        for row in table.to_pylist()
    }
    assert found == {
        (record.internal_id, record.trace_id, number, record.offset, record.size)
        for number, log in topic.records().items()
        for record in log
        if record.trace_id
    }
    assert len(found) == sum(1 for number in range(1000) if number % 4 and number != 500)  # 0 means untraced
    stored = {int(record.body): record.trace_id for log in topic.records().values() for record in log}
    assert all(stored[number] == ((number - 500) % 2**64 if number % 4 else 0) for number in range(1000))


def test_a_trace_log_has_a_line_for_every_row(redesigned: Callable[..., OnCluster], tmp_path: Path) -> None:
    topic, folder = redesigned(1), tmp_path / "traces"
    report = topic.write(batch(body=numbered(50)), traceLog=str(folder))
    [file] = folder.iterdir()
    assert file.name.startswith("publish-")
    assert file.suffix == ".jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    log = topic.records()[0]
    assert [(line["topic"], line["internal_id"], line["trace_id"]) for line in lines] == [
        (topic.name, record.internal_id, record.trace_id) for record in log
    ]
    assert len({record.trace_id for record in log} - {0}) == 50
    assert report.receipt_table().num_rows == 50


def test_original_servers_take_untraced_what_nobody_asked_to_trace(original: OnBroker, tmp_path: Path) -> None:
    report = original.write(batch(body=numbered(5)), traceLog=str(tmp_path))
    assert (report.rows, report.receipt_table()) == (5, RECEIPTS.empty_table())
    assert list(tmp_path.iterdir()) == []


def pairs_of(*pairs: tuple[str | None, bytes]) -> pa.Array:
    """Headers of two rows as with Kafka, of which the second has none."""
    return pa.array([[{"key": key, "value": value} for key, value in pairs], None], HEADER_PAIRS)


HEADER_PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def test_headers_as_json_as_a_map_as_with_kafka_and_tags(redesigned: Callable[..., OnCluster]) -> None:
    topic = redesigned(1, ext=True)
    texts = batch(
        body=numbered(4),
        headers=['{"a": {"b": 1}}', None, "{}", None],
        tag=[None, "red", None, None],
        trace_id=pa.array([None, 7, None, None], pa.int64()),
    )
    maps = pa.array([[("x", "y")], None], pa.map_(pa.string(), pa.string()))
    pairs = pa.array([[{"key": "x", "value": b"y"}, {"key": "z", "value": None}], None], HEADER_PAIRS)
    assert topic.write(texts).rows == 4
    assert topic.write(batch(body=numbered(2, 4), headers=maps)).rows == 2
    assert topic.write(batch(body=numbered(2, 6), headers=pairs)).rows == 2
    assert topic.write(batch(body=numbered(1, 8))).rows == 1
    log = topic.records()[0]
    assert [record.body for record in log] == numbered(9)
    headers = [json.loads(record.ext[3:]) if len(record.ext) > 1 else None for record in log]
    assert headers[:8] == [
        {"a": {"b": 1}},
        {"##client_dispatch_tag": "red", "##trace_id": "7"},
        {},
        {},
        {"x": "y"},
        {},
        {"x": "y", "z": None},
        {},
    ]


def test_each_attempt_gives_a_row_its_key_and_every_other_row_another(redesigned: Callable[..., OnCluster]) -> None:
    topic = redesigned(1, ext=True)
    rows = [batch(body=[b"a", b"b", b"a"]), batch(body=[b"d", b"a"])]
    for batches in (rows, [batch(body=[b"a", b"b"]), batch(body=[b"a", b"d", b"a"])]):  # cut in another way
        assert topic.attempt(*batches, of="first") == 5
    found = Counter((body, key) for body, keys in topic.keys().items() for key in keys)
    assert list(found.values()) == [2] * 5
    assert len({key for _, key in found}) == 5  # equal rows have keys of their own
    assert topic.attempt(*rows, of="second") == 5
    assert topic.attempt(*rows, of="first", task=1) == 5
    assert len({key for keys in topic.keys().values() for key in keys}) == 15


@pytest.mark.parametrize("column", ["body", "headers", "tag"])
def test_another_row_in_the_same_place_has_another_key(redesigned: Callable[..., OnCluster], column: str) -> None:
    """The second attempt of a task that is not deterministic: what it publishes is new, and no copy."""
    topic = redesigned(1, name=f"another_row_{column}", ext=True)
    row = {"body": [b"same"], "headers": ['{"n": 1}'], "tag": ["red"]}
    other = {**row, column: {"body": [b"other"], "headers": ['{"n": 2}'], "tag": ["blue"]}[column]}
    for columns in (row, other):
        assert topic.attempt(batch(**columns)) == 1
    keys = [key for each in topic.keys().values() for key in each]
    assert len(set(keys)) == len(keys) == 2


def test_rows_of_topics_are_numbered_as_in_the_task_and_lose_a_key_that_they_had(
    redesigned: Callable[..., OnCluster],
) -> None:
    topics = [redesigned(1, name=f"numbered_rows_{number}", ext=True) for number in range(2)]
    given = json.dumps({IDEMPOTENCE_HEADER: "of what was read"})
    first = batch(body=[b"-"], topic=[topics[0].name], headers=pa.array([None], pa.string()))
    second = batch(body=numbered(4), topic=[each.name for each in topics] * 2, headers=[None] * 3 + [given])
    del topics[0].options["topic"]
    assert topics[0].attempt(first, second) == 5
    found = {body: key for topic in topics for body, [key] in topic.keys().items()}
    assert {body: key.split("-")[:3] for body, key in found.items()} == {
        body: ["w", "0", f"{number}"] for number, body in enumerate([b"-", *numbered(4)])
    }


@pytest.mark.parametrize("family", ["original", "redesigned"])
def test_messages_without_headers_can_have_no_key(
    original: OnBroker, redesigned: Callable[..., OnCluster], family: str
) -> None:
    topic = redesigned(1)
    servers = original if family == "original" else topic
    task = TaskWriter(SinkOptions.parse(servers.options), {"body": "body"}, RowKeys("w", 0))
    why = rf"idempotenceKey=true: messages of topic {topic.name} have no extended headers"
    with pytest.raises(ConfigError, match=why):
        task.write(iter([batch(body=[b"a"])]))
    assert topic.bodies() == []


def test_outside_of_spark_there_is_no_task_to_name() -> None:
    with pytest.raises(ConfigError, match="idempotenceKey=true: there is no task of Spark here"):
        keys_of_batch("w")
    with pytest.raises(ConfigError, match="idempotenceKey=true: there is no task of Spark here"):
        keys_of_stream()


def many(count: int, at: int, value: Any, usual: Any = None) -> list[Any]:
    return [value if row == at else usual for row in range(count)]


BODIES = [b"x"] * 5000

BAD_ROWS = {
    "null": ({"body": many(5000, 4321, None, b"x")}, "row 4321 of Arrow batch 1: body is null"),
    "empty": ({"body": many(5000, 7, b"", b"x")}, "row 7 of Arrow batch 1: body is empty"),
    "large": ({"body": many(5000, 9, bytes(1001), b"x")}, "row 9 .*body of 1001 bytes is above max_msg_size=1000"),
    "keyed": (
        {"body": many(5000, 9, None, b"x"), "key": [f"k{row}" for row in range(5000)]},
        r"row 9 of Arrow batch 1 \(key 'k9'\): body is null",
    ),
    "null topic": ({"body": BODIES, "topic": many(5000, 3, None, "t")}, "row 3 .*: topic is null"),
    "bad topic": ({"body": BODIES, "topic": many(5000, 3, "t t", "t")}, "row 3 .*: invalid topic name 't t'"),
    "partition": ({"body": BODIES, "partition": many(5000, 8, 1024, 0)}, "row 8 .*: partition=1024: must be 0 to 1023"),
    "negative": ({"body": BODIES, "partition": many(5000, 8, -1, 0)}, "row 8 .*: partition=-1"),
    "defer": ({"body": BODIES, "defer_ms": many(5000, 8, -5, 0)}, "row 8 .*: defer_ms=-5: must be 0 or more"),
    "tag": ({"body": BODIES, "tag": many(5000, 8, "t" * 101)}, "row 8 .*: tag='t.*must have 1 to 100 characters"),
    "both": (
        {"body": BODIES, "key": many(5000, 5, "a"), "partition": many(5000, 5, 1)},
        r"row 5 of Arrow batch 1 \(key 'a'\): partition=1: the key names the partition",
    ),
}


def as_typed(columns: dict[str, Any]) -> pa.RecordBatch:
    kinds = {"partition": pa.int32(), "defer_ms": pa.int64(), "tag": pa.string(), "key": pa.string()}
    return batch(**{name: pa.array(values, kinds.get(name)) for name, values in columns.items()})


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("family", ["original", "redesigned"])
def test_bad_rows_are_named_and_nothing_of_their_batch_is_sent(
    own_broker: Broker, redesigned: Callable[..., OnCluster], name: str, family: str
) -> None:
    columns, match = BAD_ROWS[name]
    own_topic = f"bad-{family}-{name.replace(' ', '-')}"
    topic: Any = OnBroker(own_broker, own_topic) if family == "original" else redesigned(1, name=own_topic, ext=True)
    fine: dict[str, Any] = {each: [None] * 3 for each in columns} | {"body": numbered(3)}
    if "topic" in columns:
        fine["topic"] = [own_topic] * 3
        columns = {**columns, "topic": [each and each.replace("t", own_topic) for each in columns["topic"]]}
        del topic.options["topic"]
    with pytest.raises(RowInvalid, match=match.replace("'t t'", ".*")) as caught:
        topic.write(as_typed(fine), as_typed(columns), **{"nsq.max_msg_size": "1000"})
    assert str(caught.value).endswith("of this task 3 rows are stored")
    assert sorted(topic.bodies() if family == "redesigned" else topic.taken(3)) == numbered(3)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("original", {"key": ["a", "b"]}, r"row 0 .*\(key 'a'\): key='a': servers without partitions"),
    ("original", {"partition": [None, 0]}, "row 1 .*: partition=0: servers without partitions"),
    ("original", {"trace_id": [None, 5]}, "row 1 .*: trace_id=5: servers without partitions"),
    ("original", {"headers": [None, "{}"]}, "row 1 .*: headers='{}': servers without partitions"),
    ("original", {"tag": ["x", None]}, "row 0 .*: tag='x': servers without partitions"),
    ("plain", {"defer_ms": [0, 5]}, "row 1 .*: defer_ms=5: servers with partitions cannot delay"),
    ("plain", {"partition": [2, 3]}, "row 1 .*: partition=3: the topic has 3 partitions"),
    ("plain", {"headers": [None, "{}"]}, "row 1 .*: headers='{}': the topic carries no extended headers"),
    ("plain", {"tag": ["x", None]}, "row 0 .*: tag='x': the topic carries no extended headers"),
    ("ext", {"headers": [None, "{"]}, "row 1 .*not JSON"),
    ("ext", {"headers": [None, "[1]"]}, "row 1 .*must be a JSON object"),
    ("ext", {"headers": [None, f'{{"a":{"[" * 30_000}{"]" * 30_000}}}']}, "row 1 of Arrow batch 0: "),
    ("ext", {"headers": pairs_of(("a", b"1"), ("a", b"2"))}, "row 0 .*a name is there twice"),
    ("ext", {"headers": pairs_of((None, b"1"))}, "row 0 .*a header needs a name"),
    ("ext", {"headers": pairs_of(("a", b"\xff"))}, "row 0 .*can't decode"),
    ("ext", {"headers": [None, f'{{"a": "{"x" * 65535}"}}']}, "row 1 .*at most 65506"),
]


@pytest.mark.parametrize(("kind", "columns", "match"), REFUSED)
def test_what_servers_do_not_take_is_named_and_nothing_is_sent(
    original: OnBroker, redesigned: Callable[..., OnCluster], kind: str, columns: dict[str, Any], match: str
) -> None:
    flags = {"ext": True} if kind == "ext" else {"ordered": True}
    topic = redesigned(name=f"refused-{kind}", **flags)
    with pytest.raises(RowInvalid, match=match):
        (original if kind == "original" else topic).write(batch(body=numbered(2), **columns))
    assert topic.bodies() == []


@pytest.mark.parametrize("kind", ["topic", "key", "tag", "headers", "map"])
def test_a_text_that_is_not_utf_8_is_named(redesigned: Callable[..., OnCluster], kind: str) -> None:
    """Spark hands any bytes on that a string was made of."""
    topic = redesigned(name=f"not_utf_8_{kind}", ext=True)
    first = topic.name.encode() if kind == "topic" else b"{}"
    texts = pa.Array.from_buffers(pa.string(), 2, pa.array([first, b"\xff"]).buffers())
    if kind == "map":
        texts = pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), texts)
    column = "headers" if kind == "map" else kind
    if kind == "topic":
        del topic.options["topic"]
    with pytest.raises(RowInvalid, match=rf"row 1 of .*: {column}=.*: must be UTF-8; of this task 0 rows are stored"):
        topic.write(batch(body=numbered(2), **{column: texts}))
    assert topic.bodies() == []


def test_one_bad_topic_stops_the_others_of_the_batch(redesigned: Callable[..., OnCluster]) -> None:
    good, bad = (redesigned(1, name=f"one_bad_topic_{number}", ordered=True) for number in range(2))
    rows = batch(body=numbered(2), topic=[good.name, bad.name], partition=pa.array([0, 1], pa.int8()))
    del good.options["topic"]
    with pytest.raises(RowInvalid, match="row 1 of Arrow batch 0: partition=1: the topic has 1 partition"):
        good.write(rows)
    assert good.bodies() == []


def test_a_refusal_is_named_with_what_is_stored(servers: Callable[..., Any]) -> None:
    def answer(peer: Peer, command: Command) -> None:
        refuse(peer, b"E_BAD_TOPIC MPUB is not allowed here") if b"bad" in command.bodies else peer.ok()

    nsqd = servers(answer, kind=PublishNsqd)
    bodies = numbered(30)
    bodies[25] = b"bad"
    rows = batch(body=bodies, key=pa.nulls(30, pa.string()))
    limits = {"nsq.linger_max_messages": "10", "nsq.max_pending": "10"}
    with pytest.raises(WriteFailed, match="E_BAD_TOPIC MPUB is not allowed here") as caught:
        write([rows], topic="t", nsqd_tcp_addresses=str(nsqd.address), **limits)
    assert "row 20 of Arrow batch 0 and 9 others" in str(caught.value)
    assert "of this task 20 rows are stored" in str(caught.value)
    assert (caught.value.rows_stored, caught.value.rows_unknown) == (20, 0)
    assert isinstance(caught.value.__cause__, BadTopic)


def test_an_unknown_outcome_is_called_so(servers: Callable[..., Any]) -> None:
    def answer(peer: Peer, command: Command) -> None:
        if len(nsqd.commands) == 1:
            peer.ok()
        else:
            peer.sock.shutdown(2)
            raise EndOfPeer

    nsqd = servers(answer, kind=PublishNsqd)
    options = {"nsq.linger_max_messages": "10", "nsq.max_pending": "10", "nsq.publish_timeout": "2"}
    with pytest.raises(WriteFailed, match=r"may have been stored.*10 rows are stored, 10 may be") as caught:
        write([batch(body=numbered(20))], topic="t", nsqd_tcp_addresses=str(nsqd.address), **options)
    assert (caught.value.rows_stored, caught.value.rows_unknown, caught.value.possibly_stored) == (10, 10, True)


def test_nobody_there(servers: Callable[..., Any]) -> None:
    nsqd = servers(kind=PublishNsqd)
    nsqd.stop()
    with pytest.raises(WriteFailed, match=f"{nsqd.address}.*of this task 0 rows are stored") as caught:
        write([batch(body=[b"a"])], topic="t", nsqd_tcp_addresses=str(nsqd.address), **{"nsq.publish_timeout": "0.3"})
    assert isinstance(caught.value.__cause__, NoNsqd)


def test_a_topic_that_nobody_knows_or_creates_is_told_at_once(own_cluster: RedesignedCluster) -> None:
    nowhere = OnCluster(own_cluster, "nowhere", 0)
    with pytest.raises(WriteFailed, match=r"topic 'nowhere' does not exist .* of this task 0 rows are stored"):
        nowhere.write(batch(body=[b"a"]), **{"nsq.publish_timeout": "3600"})


def test_heartbeats_are_answered_while_spark_is_slow() -> None:
    with Broker(client_timeout=2000, max_heartbeat_interval=60000) as own_broker:

        def batches() -> Iterator[pa.RecordBatch]:
            yield batch(body=numbered(10))
            time.sleep(2.6)  # sleep: more than two intervals
            yield batch(body=numbered(10, 10))

        servers = {"nsqd_tcp_addresses": str(own_broker.nsqd.tcp_address), "nsq.heartbeat_interval": "1"}
        options = SinkOptions.parse({"topic": "t", "nsq.max_publish_attempts": "1", **servers})
        assert TaskWriter(options, {"body": "body"}).write(batches()).rows == 20
        account(numbered(20), taken(own_broker.nsqd.tcp_address, "t", 20)).check()


def test_an_error_of_spark_passes_through(original: OnBroker) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield batch(body=numbered(3))
        raise EOFError("the JVM is gone")

    with pytest.raises(EOFError, match="gone"):
        TaskWriter(SinkOptions.parse(original.options), {"body": "body"}).write(batches())
    assert sorted(original.taken(3)) == numbered(3)


def test_reports_add_up(redesigned: Callable[..., OnCluster]) -> None:
    topic = redesigned(1)
    reports = [topic.write(batch(body=numbered(5)), tracereceipts="true") for _ in range(2)]
    total = WriteReport.of([reports[0], None, reports[1]])
    assert (total.rows, total.tasks, total.failed, total.places) == (10, 2, 1, {(topic.name, 0): 10})
    assert total.receipts.num_rows == 10
    assert total.as_json()["places"] == [{"topic": topic.name, "partition": 0, "rows": 10}]
    assert str(total) == f"10 rows by 2 tasks ({topic.name}: 10)"
    assert str(WriteReport.of([None])) == "0 rows by 0 tasks"


# A task of the sink against real servers.


@pytest.fixture
def real_original(real_nsqd: Callable[..., RealNsqd]) -> RealNsqd:
    return real_nsqd("-max-msg-size=2000")


def create(nsqd: Standalone, command: bytes) -> None:
    client = WireClient(nsqd.tcp_address)
    assert client.command(b"INTERNAL_CREATE_TOPIC " + command + b"\n") == b"OK"
    client.close()


def test_an_original_nsqd(real_original: RealNsqd) -> None:
    servers = {"nsqd_tcp_addresses": str(real_original.tcp_address), "topic": "t"}
    rows = batch(body=numbered(20_000), defer_ms=pa.array([50 if each % 1000 == 0 else None for each in range(20_000)]))
    assert write([rows], **servers).rows == 20_000
    account(numbered(20_000), taken(real_original.tcp_address, "t", 20_000)).check()
    with pytest.raises(RowInvalid, match="trace_id=1: servers without partitions"):
        write([batch(body=[b"x"], trace_id=[1])], **servers)


def test_what_an_original_nsqd_refuses_is_told(real_original: RealNsqd) -> None:
    """A limit of the server's own, which nobody knows before."""
    bodies = numbered(3000)
    bodies[1500] = bytes(3000)
    options = {"nsqd_tcp_addresses": str(real_original.tcp_address), "topic": "t", "nsq.max_pending": "1000"}
    with pytest.raises(WriteFailed, match=r"E_BAD_MESSAGE.*row 1000 of Arrow batch 0 and 999 others") as caught:
        write([batch(body=bodies)], **options)
    stored = caught.value.rows_stored
    assert (stored in (1000, 2000), caught.value.rows_unknown) == (True, 0)  # the third command may be on its way
    account((bodies[:1000] + bodies[2000:])[:stored], taken(real_original.tcp_address, "t", stored)).check()


def test_an_original_topic_that_lookup_does_not_know_yet(
    real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]
) -> None:
    lookupd = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    report = write([batch(body=numbered(100))], topic="new", lookupd_http_addresses=str(lookupd.http_address))
    assert report.places == {("new", None): 100}
    account(numbered(100), taken(nsqd.tcp_address, "new", 100)).check()


def test_a_redesigned_nsqd(standalone_nsqd: Standalone) -> None:
    create(standalone_nsqd, b"t 0")
    create(standalone_nsqd, b"ext 0 true")
    servers = {"nsqd_tcp_addresses": str(standalone_nsqd.tcp_address)}
    taken(standalone_nsqd.tcp_address, "t", 0, partition=0)  # a channel begins with what comes after it
    rows = batch(body=numbered(5000), partition=pa.array([0] * 5000, pa.int32()))
    assert write([rows], topic="t", **servers).places == {("t", 0): 5000}
    assert taken(standalone_nsqd.tcp_address, "t", 5000, partition=0, advanced=True) == numbered(5000)
    traced = batch(body=numbered(10), partition=pa.array([0] * 10, pa.int32()), trace_id=list(range(-5, 5)))
    table = write([traced], topic="t", **servers).receipt_table()
    assert table["trace_id"].to_pylist() == [-5, -4, -3, -2, -1, 1, 2, 3, 4]
    offsets, sizes = table["offset"].to_pylist(), table["size"].to_pylist()
    assert all(offsets[row] + sizes[row] == offsets[row + 1] for row in (0, 1, 2, 3, 5, 6, 7))
    headed = batch(body=numbered(3), partition=pa.array([0] * 3, pa.int32()), headers=['{"n": "1"}', None, "{}"])
    assert write([headed], topic="ext", **servers).rows == 3
