"""Publishing: what goes with a body, the commands that say it, when to try again, and which partition a key names."""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import msgspec
from mmh3 import hash as _murmur3

from nsq_fast import _codec
from nsq_fast._codec import Records, TracedReply
from nsq_fast.errors import (
    ERROR_CODES,
    BadBody,
    BadMessage,
    ConfigError,
    ConnectionLost,
    ExtNotSupported,
    PublishFailed,
    ServerError,
    counted,
    publish_failed_class,
)
from nsq_fast.names import Address

from .dialect import Dialect
from .rdy import grown

# What goes with the body of a publish, and the commands that say it.
#
# An encoding knows how to build the command of one publish for the server at hand. It
# is chosen when the publish is made, and used when it is sent: only then is it
# known which partition it goes to, and what that server understands.
#
# - ``MessageEncoding``: one message, alone (PUB, DPUB, PUB_TRACE, PUB_EXT) or with others
#   of its kind in one command (``batch_command``);
# - ``BatchEncoding``: what a caller published as one batch; it is never taken apart;
# - ``RowsEncoding``: rows of columns, a batch without an object for each message.
#
# Of each: publishes of one ``kind`` may share a command, unless it ``is_alone``; one that ``is_plain`` says nothing but
# a body, or bodies, and gets nothing but OK: its command is made without it (``_publish_path``); ``overhead`` is the
# bytes that it adds to a body which shares its command.
# ``record_size(body)``: bytes of the largest message that count as its body for a server; 0 where that is not known.
# ``traces(body)``: the trace id and the size of each message, by which a receipt is split; ``kept(receipts)``: those
# that somebody wants; ``result(receipts, partition)``: what the caller gets when it is stored.

OK = b"OK"


class Receipt(NamedTuple):
    """Where a traced message was stored.

    Attributes:
        internal_id, trace_id: the two halves of its message id.
        offset, size: of its record in the partition's log, in bytes; None where the server did not say.
        partition: None when the server chose it.
        nsqd: the leader that stored it.
    """

    internal_id: int
    trace_id: int
    offset: int | None
    size: int | None
    partition: int | None
    nsqd: Address


def take_receipts(publishes: Iterable[Any], reply: TracedReply, partition: int | None, nsqd: Address) -> None:
    """Give each publish of a command the receipts of its messages.

    The reply to a batch holds the first id, the first offset and the size of all. The records of a batch lie one behind
    the other, with consecutive ids, and each is larger than its body by the same amount. Where the sizes contradict
    that, offset and size are None.
    """
    # youzan/nsq: nsqdserver/protocol_v2.go, getTracedReponse; nsqd/topic.go, PutMessagesNoLock
    internal_id, _, offset, spare = reply
    traces = {}
    count = 0
    for publish in publishes:
        traces[publish] = pairs = publish.encoding.traces(publish.body)
        count += len(pairs)
        for _, size in pairs:
            spare -= size
    overhead, rest = divmod(spare, max(1, count))
    for publish, pairs in traces.items():
        receipts = []
        for trace_id, body_size in pairs:
            size = body_size + overhead
            is_known = not rest and overhead >= 0
            place, length = (offset, size) if is_known else (None, None)
            receipts.append(Receipt(internal_id, trace_id, place, length, partition, nsqd))
            internal_id += 1
            offset += size
        publish.receipts = publish.encoding.kept(receipts)


class MessageEncoding(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        kind: PUB, PUB_TRACE, PUB_EXT or DPUB.
        trace_id: for PUB_TRACE.
        header: JSON, for PUB_EXT.
        is_traced: the reply is to have a receipt.
        is_optional: it is traced because tracing is switched on; servers that cannot trace take it untraced.
        defer: for DPUB: milliseconds.
        is_alone, is_plain: see above.
    """

    kind: str = "PUB"
    trace_id: int = 0
    header: bytes = b""
    is_traced: bool = False
    is_optional: bool = False
    defer: int = 0
    is_alone: bool = False
    is_plain: bool = False

    @property
    def overhead(self) -> int:
        """Bytes that it adds to a body."""
        if self.kind == "PUB_EXT":
            return 2 + len(self.header)
        return 8 if self.kind == "PUB_TRACE" else 0

    def record_size(self, body: bytes) -> int:
        # A trace id that goes before the body is no part of the record behind its head.
        return len(body) + (self.overhead if self.kind == "PUB_EXT" else 0)

    def command(self, topic: str, body: bytes, partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        kind = kind_for(self, dialect) if self.is_optional else self.kind
        if kind == "PUB":
            return "PUB", _codec.pub(topic, body, partition)
        if kind == "PUB_TRACE":
            return kind, _codec.pub_trace(topic, self.trace_id, body, partition)
        if kind == "PUB_EXT":
            return kind, _codec.pub_ext(topic, self.header, body, partition)
        return kind, _codec.dpub(topic, self.defer, body)

    def traces(self, body: bytes) -> list[tuple[int, int]]:
        return [(self.trace_id, len(body))]

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        return receipts

    def result(self, receipts: list[Receipt], partition: int | None) -> Any:
        return receipts[0] if receipts else OK


PLAIN = MessageEncoding(is_plain=True)
"""A message that says nothing but its body: the encoding of nearly all of them."""


class BatchEncoding:
    """What a caller published as one batch, or a part of it that makes one command.

    Args:
        encodings: one for each message, all of one kind; None: they say nothing but their bodies.
    """

    is_alone = True
    overhead = 0

    def __init__(self, encodings: Sequence[MessageEncoding] | None) -> None:
        self._encodings = encodings
        self.is_plain: bool = encodings is None
        self.kind: str = "PUB" if encodings is None else encodings[0].kind

    def command(self, topic: str, body: list[bytes], partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        assert self._encodings is not None, "what is plain is said without its encoding"
        return batch_command(topic, body, self._encodings, self._encodings[0], partition, dialect)

    def record_size(self, body: list[bytes]) -> int:
        encodings = self._encodings or [PLAIN] * len(body)
        return max(encoding.record_size(each) for each, encoding in zip(body, encodings, strict=True))

    def traces(self, body: list[bytes]) -> list[tuple[int, int]]:
        encodings = self._encodings or [PLAIN] * len(body)
        return [(encoding.trace_id, len(each)) for each, encoding in zip(body, encodings, strict=True)]

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        return receipts

    def result(self, receipts: list[Receipt], partition: int | None) -> Any:
        # MPUB_EXT is answered OK also where its headers have trace ids: no receipts then.
        return receipts or OK


PLAIN_BATCH = BatchEncoding(None)


def batch_command(
    topic: str, bodies: Sequence[bytes], encodings: Iterable[Any], first: Any, partition: int | None, dialect: Dialect
) -> tuple[str, bytes]:
    """The command of several messages, and its bytes. ``encodings`` are of one kind, as ``first`` is."""
    kind = "PUB" if first is PLAIN else kind_for(first, dialect)
    if kind == "PUB":
        return "MPUB", _codec.mpub(topic, bodies, partition)
    pairs = zip(encodings, bodies, strict=True)
    if kind == "PUB_TRACE":
        return "MPUB_TRACE", _codec.mpub_trace(
            topic, [(encoding.trace_id, body) for encoding, body in pairs], partition
        )
    return "MPUB_EXT", _codec.mpub_ext(topic, [(encoding.header, body) for encoding, body in pairs], partition)


def kind_for(encoding: MessageEncoding, dialect: Dialect) -> str:
    """What a server of this dialect gets: tracing that nobody asked for by name is left out where it is unknown."""
    return "PUB" if encoding.is_optional and not dialect.supports(encoding.kind) else encoding.kind


# What goes with a publish of rows of columns: a batch without an object for each message.


class StoredRows(NamedTuple):
    """What became of a publish of rows.

    Attributes:
        messages: how many were stored.
        partition: where; None when the server was to choose, or has none.
        receipts: of the messages that have a trace id other than 0, in order; none where the server gives none.
    """

    messages: int
    partition: int | None
    receipts: list[Receipt]


class RowsEncoding:
    """Rows of ``records``: ``rows[start:stop]``, or rows ``start`` to ``stop`` without ``rows``. The body is not used.

    Args:
        is_optional: servers that cannot trace take them untraced.
    """

    is_alone = True
    is_plain = False
    overhead = 0

    def __init__(self, records: Records, rows: bytes | None, start: int, stop: int, *, is_optional: bool) -> None:
        self._records = records
        self._span = (rows, start, stop)
        self._encoding = _encoding_of(records, is_optional)
        self.kind: str = self._encoding.kind
        self.count: int = stop - start

    def command(self, topic: str, body: object, partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        kind = kind_for(self._encoding, dialect)
        name = f"M{kind}"
        dialect.require(name)
        build = getattr(self._records, name.lower())
        return name, build(topic, partition, *self._span)

    def record_size(self, body: object) -> int:
        return 0

    def traces(self, body: object) -> list[tuple[int, int]]:
        return self._records.pairs(*self._span)

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        return [receipt for receipt in receipts if receipt.trace_id]

    def result(self, receipts: list[Receipt], partition: int | None) -> StoredRows:
        return StoredRows(self.count, partition, receipts)


Encoding: TypeAlias = MessageEncoding | BatchEncoding | RowsEncoding
"""How one publish is sent, and what its caller gets."""


def _encoding_of(records: Records, is_optional: bool) -> MessageEncoding:
    if records.has_headers:
        return MessageEncoding("PUB_EXT")
    return MessageEncoding("PUB_TRACE", is_traced=True, is_optional=is_optional) if records.is_traced else PLAIN


# Bodies that a publisher compresses: what youzan's Go client does on topics with extended headers.
#
# The header names the codec and the size of the body before: ``nsq.client.compress`` and ``nsq.msg.size``, both
# strings. The codecs are gzip, and the block formats of snappy and lz4, without a size or a frame around them: a reader
# takes the size from the header.

# youzan/go-nsq: compress.go, NSQ_CLIENT_COMPRESS_HEADER_KEY, CompressDecodec_GZIP and the others; message.go, where a
# consumer takes both headers as strings.
CODEC_HEADER = "nsq.client.compress"
SIZE_HEADER = "nsq.msg.size"
GZIP, SNAPPY, LZ4 = "1", "2", "3"

CODEC_NUMBERS: Mapping[str, str] = MappingProxyType({"gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4})
"""The name of a codec -> its number in the header."""

# What the two headers add to a message, about: less is not worth it.
_LEAST_SAVING = 64


def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def _snappy(body: bytes) -> bytes:
    import snappy  # type: ignore[import-untyped]

    return bytes(snappy.compress(body))


def _lz4(body: bytes) -> bytes:
    import lz4.block  # type: ignore[import-untyped]

    return bytes(lz4.block.compress(body, store_size=False))


_CODECS: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({"gzip": _gzip, "snappy": _snappy, "lz4": _lz4})


def compressed(codec: str, body: bytes) -> tuple[bytes, dict[str, str]] | None:
    """The body compressed with a codec of ``CODEC_NUMBERS``, and its headers; None where that saves nothing."""
    packed = _CODECS[codec](body)
    if len(packed) + _LEAST_SAVING > len(body):
        return None
    return packed, {CODEC_HEADER: CODEC_NUMBERS[codec], SIZE_HEADER: str(len(body))}


# What to do after a failed publish: one table, and the pauses between attempts.
#
# The rows of the error codes (``SERVER_ERRORS``) are made of the policy flags on
# the error classes (``retriable``, ``stale_topology``, ``outcome_unknown``). A few
# codes stand for two different things, and only the text tells them apart: those
# rows are in ``ERROR_TEXTS``. Which errors also end the connection differs between
# the server families: that column is in ``dialect``. A server works
# a connection's commands off in order and reads no further after a fatal error:
# what was queued behind one was certainly not stored, while a publish that was
# waiting for its reply when the connection broke has an unknown outcome. The
# session tells the two apart, and ConnectionLost says which it is.
#
# Pure: the random source of the jitter is an argument.
#
# Called by ``client.publishes``; usable by any other embedder of the session.


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often and how patiently to retry. Delays in seconds.

    Attributes:
        leader_misses: so many attempts that meet a stale or unready leader use up none of ``max_attempts``: with lookup
            any number, as time ends them. Without, nobody says who leads: each nsqd but the last is guessed for free.
    """

    max_attempts: int
    retry_unknown_outcome: bool
    base_delay: float
    max_delay: float
    jitter: float = 0.2
    leader_misses: float = 0


class RetryDecision(msgspec.Struct, frozen=True):
    """What to do after one failed attempt.

    Attributes:
        retry: try again.
        pause: wait ``retry_delay`` before that; otherwise the next connection may take it at once.
        refresh: the map of who takes the topic is out of date: look it up.
        possibly_stored: the failed attempt may have been stored all the same.
        counts: it used up one of the attempts.
        splits: it may have failed because of another publish in its command: that is told by trying each alone.
        leader: the nsqd is not (yet, or any more) the one that takes the partition's publishes: another may be.
    """

    retry: bool
    pause: bool = False
    refresh: bool = False
    possibly_stored: bool = False
    counts: bool = True
    leader: bool = False
    splits: bool = False


# The table. A connection that ended is one of the first two rows; an error frame has the row of its code, below.
NOT_EXECUTED = RetryDecision(retry=True, refresh=True, counts=False)
OUTCOME_UNKNOWN = RetryDecision(retry=True, refresh=True, possibly_stored=True)
OURS = RetryDecision(retry=False)


def _row(error: type[ServerError]) -> RetryDecision:
    return RetryDecision(
        retry=error.retriable,
        pause=error.retriable,
        refresh=error.stale_topology or error is ExtNotSupported,  # a topic that had headers was made anew without
        possibly_stored=error.outcome_unknown,
        leader=error.stale_topology,
        splits=error in (BadMessage, BadBody),
    )


SERVER_ERRORS: Mapping[str, RetryDecision] = MappingProxyType({code: _row(cls) for code, cls in ERROR_CODES.items()})
"""Error code -> its row. A code that is not here is not retried."""


NOT_READ = RetryDecision(retry=True)
REFUSED_FOR_NOW = RetryDecision(retry=True, pause=True)
TOO_LARGE = RetryDecision(retry=False, splits=True)
LEADER_LEAVES = RetryDecision(retry=True, pause=True, refresh=True, leader=True)

LONGEST_LEADER_PAUSE = 1.0
"""Seconds. A partition is back soon after its leader has moved: lookup and the new leader are asked this often."""

MOST_SERVERS_LOST = 2
"""A publish that so many servers were working on when they ended the connection is sent to no other."""

ENDS_WITHIN = 1.0
"""Seconds. What ends a server does so sooner. A publish that waits there for longer does so for a disk or a replica."""


_LEAVING = r"(?:ErrType:\d+ ErrCode:\d+ : )?exiting|pub to wait channel timeout|pub timeout while pop wait queue"
_TOO_LARGE = r"(?:ErrType:\d+ ErrCode:\d+ : )?invalid message write size .*"

ERROR_TEXTS: Sequence[tuple[str, str, RetryDecision]] = (
    # The rest of the command did not arrive within the server's read deadline (two heartbeat intervals). Nothing was
    # stored, and the message was not at fault.
    # nsqio/nsq: nsqd/protocol_v2.go, PUB, DPUB, MPUB, readMPUB;
    # youzan/nsq: nsqdserver/protocol_v2.go, preparePub, internalPubExtAndTrace, readMPUBEXT.
    (
        "E_BAD_MESSAGE",
        r"(?:[DM]?PUB )?failed to read message(?: body(?: size)?|\(\d+\) body size)",
        NOT_READ,
    ),
    ("E_BAD_BODY", r"(?:[DM]?PUB )?failed to read (?:body size|message count)", NOT_READ),
    # The server is shutting down and stored nothing. MPUB is not among them: it may break off in the middle.
    # nsqio/nsq: nsqd/topic.go, PutMessage.
    ("E_PUB_FAILED", "PUB failed exiting", REFUSED_FOR_NOW),
    ("E_DPUB_FAILED", "DPUB failed exiting", REFUSED_FOR_NOW),
    # A leader of the redesigned NSQ is shutting down, or its partition has taken nothing for 3 s, as while a replica is
    # being lost. The publish was refused before any of it was stored; another nsqd will lead.
    # youzan/nsq: nsqdserver/protocol_v2.go, internalPubAsync, internalMPubAsync; nsqdserver/context.go,
    # internalPubLoop; nsqd/topic.go, PutMessageNoLock, PutMessagesNoLock.
    ("E_PUB_FAILED", _LEAVING, LEADER_LEAVES),
    ("E_MPUB_FAILED", _LEAVING, LEADER_LEAVES),
    # Too large for the record of an extended topic (dialect.EXT_RECORD_BYTES). Nothing is stored.
    # youzan/nsq: nsqd/diskqueue_writer.go, writeOne; nsqd/topic.go, PutMessagesNoLock
    ("E_PUB_FAILED", _TOO_LARGE, TOO_LARGE),
    ("E_MPUB_FAILED", _TOO_LARGE, TOO_LARGE),
    # The server could not ask its auth server whether a permission that has expired still holds.
    # nsqio/nsq: nsqd/protocol_v2.go, CheckAuth.
    ("E_AUTH_FAILED", "AUTH failed", REFUSED_FOR_NOW),
)
"""Error code, regular expression of the whole of its detail, row: what the text of an error says beyond its code. The
first that fits goes before the row of the code. None is compiled before an error is compared with it: most programs
never meet one."""


def classify(error: BaseException) -> RetryDecision:
    """The row of the table for an error of a publish, before attempts and options are looked at."""
    if isinstance(error, ServerError):
        # The whole text has to match: a message that only begins so may be another, of a newer server.
        for code, text, decision in ERROR_TEXTS:
            if code == error.code and re.fullmatch(text, error.detail):
                return decision
        return SERVER_ERRORS.get(error.code, OURS)
    if isinstance(error, ConnectionLost):
        return OUTCOME_UNKNOWN if error.outcome_unknown else NOT_EXECUTED
    return OURS


def decide(
    error: BaseException, attempts: int, policy: RetryPolicy, misses: int = 0, *, is_again: bool = False
) -> RetryDecision:
    """What to do now that attempt number ``attempts`` (from 1) failed with ``error``.

    Args:
        misses: how many of the attempts before this one were misses, see ``is_miss``.
        is_again: the server has ended a connection before while it had just begun to work on this publish.
    """
    decision = classify(error)
    if not decision.retry or not decision.counts:
        return decision
    allowed = policy.retry_unknown_outcome or not decision.possibly_stored
    is_left = is_miss(decision, error, policy, misses, is_again) or attempts - misses < policy.max_attempts
    if not (allowed and is_left):
        return msgspec.structs.replace(decision, retry=False)
    if is_again and is_ended_by_server(error):
        return msgspec.structs.replace(decision, pause=True)  # it takes some time to end, or to start
    return decision


def is_miss(decision: RetryDecision, error: BaseException, policy: RetryPolicy, misses: int, is_again: bool) -> bool:
    """Whether an attempt that failed so uses up none of ``max_attempts``: it says nothing new of the publish itself.

    It met a leader that moves, or the server ended the connection for another reason than this publish. Three nsqds
    that are restarted in turn, each while publishes wait there for the replica that is away, would else fail them
    within seconds: 82 of 1.5 million in 25 minutes of faults of a real cluster. Or the same server has ended several
    connections in turn: one that is told to end does that to all it has, and failed 2 of 250,000 so.
    """
    if decision.leader:
        return misses < policy.leader_misses
    return is_ended_by_server(error) and (is_again or not may_have_ended_server(error))


def may_have_ended_server(error: BaseException) -> bool:
    """Whether the publish that failed with ``error`` may be what ended the server: it had just begun to work on it.

    A command of an original or redesigned server is worked off before the next one of its connection is read.
    """
    return is_ended_by_server(error) and error.was_first and error.waited < ENDS_WITHIN


def is_ended_by_server(error: BaseException) -> TypeGuard[ConnectionLost]:
    """Whether the server closed or reset the connection while it owed the reply to this publish."""
    return isinstance(error, ConnectionLost) and error.outcome_unknown and error.is_abrupt


def retry_delay(attempts: int, policy: RetryPolicy, random: Callable[[], float], *, for_leader: bool = False) -> float:
    """Seconds to wait after attempt number ``attempts``: exponential, capped, shortened by up to the jitter share.

    Args:
        random: gives numbers in [0, 1).
        for_leader: what is waited for is the leader of a partition.
    """
    longest = min(policy.max_delay, LONGEST_LEADER_PAUSE) if for_leader else policy.max_delay
    return grown(policy.base_delay, 2.0, attempts - 1, longest) * (1.0 - policy.jitter * random())


def publish_failed(
    topic: str, error: BaseException, attempts: int, possibly_stored: bool, why: str = ""
) -> PublishFailed:
    """The error that the caller of a publish gets; ``error`` becomes its cause. ``why``: what to say of it."""
    stored = "; it may have been stored all the same" if possibly_stored else ""
    times = counted(attempts, "attempt")
    failed = publish_failed_class(error)(
        f"publish to {topic!r} failed after {times}: {why or str(error) or repr(error)}{stored}",
        attempts=attempts,
        possibly_stored=possibly_stored,
    )
    failed.__cause__ = error
    return failed


# Copies of a message, as a second attempt at the same write makes them: both carry the same key in their headers.

IDEMPOTENCE_HEADER = "nsq_fast.idempotence_key"
"""The extended header that holds the key, a string. Of messages of a topic with the same key one is enough."""


class SeenKeys:
    """The keys that came last, each with the id of the message that had it first.

    Args:
        limit: most keys that are kept; the one that came first is forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first_ids: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._first_ids)

    def is_copy(self, topic: str, key: str, message_id: bytes) -> bool:
        """Whether another message of the topic had the key before.

        The first that had it is none, however often it is delivered: it stays on the server until it is finished.
        """
        first = self._first_ids.setdefault((topic, key), message_id)
        if len(self._first_ids) > self._limit:
            self._first_ids.popitem(last=False)
        return first != message_id


# Which partition a message with a key goes to.
#
# A key decides over the number of partitions the topic *has*
# (`Meta.partition_num`), available or not: order by key would be lost if a key
# moved while its partition has no leader. Two clients that publish the same
# keys must choose the same strategy; youzan's differ, and no mapping agrees
# with both:
#
# - ``murmur3``, as youzan's Go client: MurmurHash3 x86 32 bit with seed 0 of
#   the bytes of the key (UTF-8 for str), unsigned, modulo the partitions.
# - ``hashcode``, as youzan's Java client: ``Math.abs(key.hashCode() % n)``,
#   where str is a Java String and int a Java Long.
#
# Whoever has another mapping gives a function of their own, as in the Java client.


Key: TypeAlias = "str | bytes | int"
KeyPartitioner = Callable[[Key, int], int]

_INT_SIGN = 1 << 31
_INT_MASK = (1 << 32) - 1


def murmur3_partition(key: Key, partition_num: int) -> int:
    """The partition of ``key`` (str or bytes) as youzan's Go client computes it.

    Raises TypeError for anything else, and ValueError for a str that UTF-8 has no bytes for.
    """
    if partition_num < 1:
        _checked(partition_num)
    try:
        # Never a str: mmh3 ends the process where one has no bytes.
        data = key.encode() if isinstance(key, str) else key
        found: int = _murmur3(data, 0, False) % partition_num  # type: ignore[arg-type]  # it raises TypeError then
    except TypeError:
        raise TypeError(f"key for murmur3 must be str or bytes, not {type(key).__name__}") from None
    except UnicodeEncodeError:
        raise ValueError(f"key {key!r} holds lone surrogates, which UTF-8 cannot carry to a server") from None
    return found


def hashcode_partition(key: Key, partition_num: int) -> int:
    """The partition of ``key`` (str, or int as Long) as youzan's Java client computes it.

    Raises TypeError for bytes: Java hashes an array by its address.
    """
    if isinstance(key, str):
        return partition_of_hash(java_string_hash(key), partition_num)
    if isinstance(key, int) and not isinstance(key, bool):
        return partition_of_hash(java_long_hash(key), partition_num)
    raise TypeError(f"key for hashcode must be str or int, not {type(key).__name__}")


def partition_of_hash(java_hash: int, partition_num: int) -> int:
    """``Math.abs(hash % n)``; Java's remainder has the sign of the dividend, so this is ``abs(hash) % n``."""
    return abs(java_hash) % _checked(partition_num)


def java_string_hash(text: str) -> int:
    """``String.hashCode()``: over UTF-16 code units, wrapping at 32 bits, signed."""
    # A char of Java is a UTF-16 code unit, and half of a surrogate pair is one too.
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for index in range(0, len(data), 2):
        value = (31 * value + (data[index] << 8 | data[index + 1])) & _INT_MASK
    return _signed(value)


def java_long_hash(value: int) -> int:
    """``Long.hashCode()``. Raises ValueError outside 64 bits. An Integer's hash is its value."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"key {value} does not fit a Java long")
    unsigned = value & (1 << 64) - 1
    return _signed((unsigned ^ unsigned >> 32) & _INT_MASK)


def _signed(value: int) -> int:
    return value - (1 << 32) if value & _INT_SIGN else value


def _checked(partition_num: int) -> int:
    if partition_num < 1:
        raise ValueError(f"partition_num={partition_num}: must be at least 1")
    return partition_num


KEY_PARTITIONERS: Mapping[str, KeyPartitioner] = MappingProxyType(
    {"murmur3": murmur3_partition, "hashcode": hashcode_partition}
)


def key_partitioner(strategy: str | KeyPartitioner) -> KeyPartitioner:
    """The function for ``strategy``, a name or a function; raise ConfigError for a name that does not exist.

    What a function of the user's raises, or returns that is no number of a partition, becomes a ConfigError.
    """
    if callable(strategy):
        return _checking(strategy)
    try:
        return KEY_PARTITIONERS[strategy]
    except KeyError:
        raise ConfigError(f"key strategy {strategy!r}: must be one of {', '.join(KEY_PARTITIONERS)}") from None


def _checking(function: KeyPartitioner) -> KeyPartitioner:
    name = getattr(function, "__name__", repr(function))

    def partition(key: Key, partition_num: int) -> int:
        call = f"key_strategy: {name}({key!r:.100}, {partition_num})"
        try:
            number = function(key, partition_num)
        except Exception as error:
            raise ConfigError(f"{call} failed: {error!r}") from error
        if type(number) is not int or not 0 <= number < partition_num:
            raise ConfigError(f"{call} is {number!r:.100}: must be a whole number, 0 to {partition_num - 1}")
        return number

    return partition
