"""Publishing without sockets: encodings and receipts, the table of retries, copies, and keys."""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nsq_fast import errors
from nsq_fast._codec import TracedReply
from nsq_fast._publish_path import COUNT_BYTES, LENGTH_BYTES
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import REDESIGNED
from nsq_fast.protocol.publishing import (
    PLAIN,
    BatchEncoding,
    MessageEncoding,
    Receipt,
    RetryDecision,
    RetryPolicy,
    SeenKeys,
    batch_command,
    classify,
    decide,
    hashcode_partition,
    java_long_hash,
    java_string_hash,
    key_partitioner,
    murmur3_partition,
    partition_of_hash,
    retry_delay,
    take_receipts,
)

# What a message takes in a command, and where receipts come from

TRACED = MessageEncoding("PUB_TRACE", 7, is_traced=True)
HEADER = MessageEncoding("PUB_EXT", header=b'{"a":1}')
NSQD = Address("127.0.0.1", 4150)


@pytest.mark.parametrize("encoding", [PLAIN, TRACED, HEADER])
def test_the_overhead_is_what_a_message_takes_besides_its_body(encoding: MessageEncoding) -> None:
    _, one = batch_command("t", [b"x"], [encoding], encoding, None, REDESIGNED)
    _, two = batch_command("t", [b"x", b"yy"], [encoding, encoding], encoding, None, REDESIGNED)
    assert len(two) - len(one) == LENGTH_BYTES + 2 + encoding.overhead
    _, body = one.split(b"\n", 1)
    assert COUNT_BYTES + LENGTH_BYTES + 1 + encoding.overhead == int.from_bytes(body[:4], "big")


class Traced:
    """What has receipts."""

    def __init__(self, body: Any, encoding: Any) -> None:
        self.body, self.encoding = body, encoding
        self.receipts: list[Receipt] = []


@pytest.mark.parametrize(
    ("size", "places"), [(31 + 36, [(260, 31), (291, 36)]), (68, [(None, None)] * 2), (3, [(None, None)] * 2)]
)
@pytest.mark.parametrize("is_one_command", [True, False])
def test_receipts_of_a_batch_where_the_sizes_add_up(size: int, places: list[Any], is_one_command: bool) -> None:
    traces = [MessageEncoding("PUB_TRACE", trace_id, is_traced=True) for trace_id in (5, 6)]
    one: Any = Traced([b"x", b"123456"], BatchEncoding(traces))
    publishes = [one] if is_one_command else [Traced(b"x", traces[0]), Traced(b"123456", traces[1])]
    take_receipts(publishes, TracedReply(internal_id=9, trace_id=0, offset=260, size=size), 3, NSQD)
    assert [receipt for publish in publishes for receipt in publish.receipts] == [
        Receipt(9, 5, *places[0], 3, NSQD),
        Receipt(10, 6, *places[1], 3, NSQD),
    ]


# The table of retries: every row, the limits, and the pauses

POLICY = RetryPolicy(max_attempts=3, retry_unknown_outcome=True, base_delay=0.05, max_delay=2.0)
CAREFUL = replace(POLICY, retry_unknown_outcome=False)

NO_MORE = RetryDecision(retry=False)
BLAMED = RetryDecision(retry=False, splits=True)
MOVES = RetryDecision(retry=True, pause=True, refresh=True, leader=True)
ROWS = [
    (errors.BadMessage("x"), BLAMED),
    (errors.BadTopic("x"), NO_MORE),
    (errors.BadBody("x"), BLAMED),
    (errors.Invalid("x"), NO_MORE),
    (errors.BadPartition("x"), NO_MORE),
    (errors.Unauthorized("x"), NO_MORE),
    (errors.AuthFirst("x"), NO_MORE),
    (errors.ExtNotSupported("x"), RetryDecision(retry=False, refresh=True)),
    (errors.HeaderInvalid("x"), NO_MORE),
    (errors.TraceIdInvalid("x"), NO_MORE),
    (errors.ServerError("x", code="E_NEVER_SEEN"), NO_MORE),
    (errors.BodyInvalid("x"), NO_MORE),
    (errors.LocalProtocolError("x"), NO_MORE),
    (ValueError("x"), NO_MORE),
    (errors.PubTooMuchWaiting("x"), RetryDecision(retry=True, pause=True)),
    (errors.PubFailed("x"), RetryDecision(retry=True, pause=True, possibly_stored=True)),
    (errors.MpubFailed("x"), RetryDecision(retry=True, pause=True, possibly_stored=True)),
    (errors.NotLeader(""), RetryDecision(retry=True, pause=True, refresh=True, leader=True)),
    (errors.TopicNotExist(""), RetryDecision(retry=True, pause=True, refresh=True, leader=True)),
    (errors.NotWritable(""), RetryDecision(retry=True, pause=True, refresh=True, possibly_stored=True, leader=True)),
    # The server did not get the whole command, or stored nothing: another one may take it.
    (errors.BadMessage("PUB failed to read message body"), RetryDecision(retry=True)),
    (errors.BadMessage("PUB failed to read message body size"), RetryDecision(retry=True)),
    (errors.BadMessage("DPUB failed to read message body"), RetryDecision(retry=True)),
    (errors.BadMessage("MPUB failed to read message(17) body size"), RetryDecision(retry=True)),
    (errors.BadMessage("MPUB failed to read message body"), RetryDecision(retry=True)),
    (errors.BadMessage("failed to read message body"), RetryDecision(retry=True)),
    (errors.BadBody("MPUB failed to read body size"), RetryDecision(retry=True)),
    (errors.BadBody("MPUB failed to read message count"), RetryDecision(retry=True)),
    (errors.BadBody("failed to read body size"), RetryDecision(retry=True)),
    (errors.PubFailed("PUB failed exiting"), RetryDecision(retry=True, pause=True)),
    (errors.DpubFailed("DPUB failed exiting"), RetryDecision(retry=True, pause=True)),
    (errors.MpubFailed("MPUB failed exiting"), RetryDecision(retry=True, pause=True, possibly_stored=True)),
    (errors.PubFailed("exiting"), MOVES),
    (errors.MpubFailed("exiting"), MOVES),
    (errors.PubFailed("ErrType:9 ErrCode:0 : exiting"), MOVES),
    (errors.PubFailed("pub to wait channel timeout"), MOVES),
    (errors.MpubFailed("pub timeout while pop wait queue"), MOVES),
    (errors.PubFailed("topic coordinator is exiting"), RetryDecision(retry=True, pause=True, possibly_stored=True)),
    (errors.PubFailed("invalid message write size (1048603) maxMsgSize=1048602"), BLAMED),
    (errors.MpubFailed("ErrType:9 ErrCode:0 : invalid message write size (9) maxMsgSize=8"), BLAMED),
    (errors.AuthFailed("AUTH failed"), RetryDecision(retry=True, pause=True)),
    (errors.AuthFailed("x"), NO_MORE),
    (errors.BadMessage("PUB message too big 2 > 1"), BLAMED),
    (errors.BadMessage("MPUB invalid message(1) body size 0"), BLAMED),
    (errors.ConnectionLost("x"), RetryDecision(retry=True, refresh=True, possibly_stored=True)),
    (errors.HeartbeatMissed("x"), RetryDecision(retry=True, refresh=True, possibly_stored=True)),
    (errors.RemoteProtocolError("x"), NO_MORE),
]


@pytest.mark.parametrize(("error", "expected"), ROWS, ids=lambda value: type(value).__name__)
def test_each_error_has_its_row(error: Exception, expected: RetryDecision) -> None:
    assert classify(error) == expected
    assert decide(error, 1, POLICY) == expected


def test_what_the_server_never_executed_is_retried_without_using_up_an_attempt() -> None:
    for attempts in (1, 3, 50):
        for policy in (POLICY, CAREFUL):
            error = errors.ConnectionLost("x")
            error.outcome_unknown = False
            decision = decide(error, attempts, policy)
            assert decision.retry
            assert not decision.possibly_stored
            assert not decision.counts


def test_moves_of_the_leader_have_no_limit_but_time() -> None:
    patient = replace(POLICY, leader_misses=inf)
    assert decide(errors.NotLeader(""), 1000, patient, misses=999).retry
    assert decide(errors.PubFailed("exiting"), 1000, patient, misses=999).retry
    assert not decide(errors.NotLeader(""), 3, POLICY).retry  # without lookup nobody says where it went
    assert decide(errors.PubFailed("x"), 6, patient, misses=4).retry
    assert not decide(errors.PubFailed("x"), 7, patient, misses=4).retry
    assert not decide(errors.NotWritable(""), 1, replace(patient, retry_unknown_outcome=False)).retry


@pytest.mark.parametrize("error", [errors.ConnectionLost("x"), errors.PubFailed("x"), errors.NotWritable("")])
def test_an_unknown_outcome_is_retried_only_where_allowed(error: Exception) -> None:
    decision = decide(error, 1, CAREFUL)
    assert not decision.retry
    assert decision.possibly_stored


@given(attempts=st.integers(1, 10_000), share=st.floats(0, 1, exclude_max=True))
def test_pauses_grow_stay_below_the_cap_and_keep_most_of_their_length(attempts: int, share: float) -> None:
    full = retry_delay(attempts, POLICY, lambda: 0.0)
    assert full == min(2.0, 0.05 * 2.0 ** min(attempts - 1, 64))
    assert 0.8 * full - 1e-9 <= retry_delay(attempts, POLICY, lambda: share) <= full


def test_a_leader_is_asked_for_each_second_at_least() -> None:
    assert retry_delay(50, POLICY, lambda: 0.0) == 2.0
    assert retry_delay(50, POLICY, lambda: 0.0, for_leader=True) == 1.0
    assert retry_delay(50, replace(POLICY, max_delay=0.3), lambda: 0.0, for_leader=True) == 0.3


# The window of idempotence keys


def test_another_message_with_the_key_is_a_copy_and_the_first_is_none_however_often_it_comes() -> None:
    seen = SeenKeys(10)
    assert [seen.is_copy("t", "k", each) for each in (b"1", b"2", b"1", b"3", b"2")] == [False, True, False, True, True]


@given(
    st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from("abcde"), st.sampled_from([b"1", b"2", b"3"]))),
    st.integers(1, 4),
)
def test_it_remembers_the_keys_that_came_last(messages: list[tuple[str, str, bytes]], limit: int) -> None:
    """Of each topic by itself, and no more of them than the limit."""
    seen, model = SeenKeys(limit), OrderedDict[tuple[str, str], bytes]()
    for topic, key, message_id in messages:
        first = model.setdefault((topic, key), message_id)
        assert seen.is_copy(topic, key, message_id) == (first != message_id)
        if len(model) > limit:
            model.popitem(last=False)
        assert len(seen) == len(model) <= limit


# Keys to partitions as youzan's Go and Java clients have them.


COUNTS = (3, 4, 7, 8, 16, 254)
# MurmurHash3 of the UTF-8 bytes by Go's spaolacci/murmur3.
GO_HASHES = {
    "": 0, "Straße": 1561572846, "ключ": 2589532226, "😀 smile": 3428722043, "user:9999999999": 2473400226,
    "\0": 1364076727, "AaAaBB": 575277197, "BBBBAa": 1764903283,
    "The quick brown fox jumps over the lazy dog": 776992547, "\U0001d4b3-mixed-中文": 1732519482,
    "tail1": 3138299663, "tail12": 641306393, "tail123": 3714286843, "tail1234": 1494427091,
}  # fmt: skip
# String.hashCode and Long.hashCode by a JVM.
JAVA_HASHES = {
    "": 0, "a": 97, "hello": 99162322, "order-12345": 478832884, "123456789": -1867378635, "中文": 646394,
    "user:1001": 303304367, "polygenelubricants": -2147483648, "Straße": -1808122922, "ключ": 33309882,
    "😀 smile": -1559691765, "user:9999999999": 2131110575, "\0": 0, "AaAaBB": 1952508096, "BBBBAa": 1952508096,
    "The quick brown fox jumps over the lazy dog": -609428141, "\U0001d4b3-mixed-中文": -2036380197,
    "tail12": -881170831,
    0: 0, -1: 0, 1 << 32: 1, (1 << 63) - 1: -2147483648, -(1 << 63): -2147483648, -4294967297: 1,
    9007199254740993: 2097153, 1 << 31: -2147483648, 1234567890123: 1912276436, -5: 4,
}  # fmt: skip
# What the two clients themselves make of some, for 3, 4 and 8 partitions.
GO_PARTITIONS = {
    "a": (2, 2, 2), "hello": (1, 3, 7), "order-12345": (2, 2, 6), "123456789": (0, 2, 2), "中文": (2, 3, 7),
    "user:1001": (2, 0, 0), "polygenelubricants": (2, 0, 0),
}  # fmt: skip
JAVA_PARTITIONS = {
    "": (0, 0, 0), "a": (1, 1, 1), "hello": (1, 2, 2), "order-12345": (1, 0, 4), "123456789": (0, 3, 3),
    "中文": (2, 2, 2), "user:1001": (2, 3, 7), "polygenelubricants": (2, 0, 0), 1234567890123: (2, 0, 4), -5: (1, 0, 4),
}  # fmt: skip


@pytest.mark.parametrize(("key", "murmur3"), GO_HASHES.items())
def test_murmur3_is_that_of_the_go_client(key: str, murmur3: int) -> None:
    assert murmur3_partition(key, 1 << 32) == murmur3
    for count in COUNTS:
        assert murmur3_partition(key, count) == murmur3_partition(key.encode(), count) == murmur3 % count


@pytest.mark.parametrize(("key", "java_hash"), JAVA_HASHES.items())
def test_hashcode_is_that_of_the_java_client(key: str | int, java_hash: int) -> None:
    assert (java_string_hash(key) if isinstance(key, str) else java_long_hash(key)) == java_hash
    for count in COUNTS:
        assert hashcode_partition(key, count) == abs(java_hash) % count


def test_partitions_are_those_of_both_clients() -> None:
    for key, partitions in GO_PARTITIONS.items():
        assert tuple(murmur3_partition(key, count) for count in (3, 4, 8)) == partitions
    for java_key, partitions in JAVA_PARTITIONS.items():
        assert tuple(hashcode_partition(java_key, count) for count in (3, 4, 8)) == partitions
    assert [partition_of_hash(-7, count) for count in (3, 4, 8)] == [1, 3, 7], "an Integer's hash is its value"


@given(st.text(), st.integers(1, 254))
def test_every_key_has_a_partition(key: str, partition_num: int) -> None:
    assert 0 <= hashcode_partition(key, partition_num) < partition_num
    assert 0 <= murmur3_partition(key.encode("utf-8", "surrogatepass"), partition_num) < partition_num


def test_keys_that_mean_nothing_to_a_strategy_are_refused() -> None:
    with pytest.raises(TypeError, match="bytes"):
        hashcode_partition(b"a", 3)
    with pytest.raises(TypeError, match="int"):
        murmur3_partition(5, 3)
    with pytest.raises(ValueError, match="long"):
        hashcode_partition(1 << 63, 3)
    with pytest.raises(ValueError, match="partition_num"):
        murmur3_partition("a", 0)
    with pytest.raises(ValueError, match="lone surrogates"):
        murmur3_partition("\ud800", 3)
    with pytest.raises(ConfigError, match="murmur3, hashcode"):
        key_partitioner("md5")
    assert key_partitioner("murmur3") is murmur3_partition
