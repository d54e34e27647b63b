"""Dynamic configuration: what a document says is done without a restart; the last good one stays."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent.event import Event
from support.http_server import Question, ScriptedHttp, reply
from support.scripted_nsqd import noting
from support.servers import free_address
from support.waiting import until

from nsq_fast import ConfigDocument, ConfigSource, Consumer, FileConfigSource, HttpConfigSource, Producer, TraceLog
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.client.trace import PublishRecord
from nsq_fast.errors import ConfigError


class KeptFile:
    has_tags = False

    def __init__(self, path: Path) -> None:
        self._path = path / "config.json"
        self.source = FileConfigSource(self._path, interval=0.02)

    def write(self, content: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(content)
        new.rename(self._path)

    def away(self) -> None:
        self._path.rename(self._path.with_suffix(".away"))

    def back(self) -> None:
        self._path.with_suffix(".away").rename(self._path)

    def stop(self) -> None:
        pass


class KeptUrl:
    """An HTTP server of one document; with an ETag it sends it once only."""

    def __init__(self, has_tags: bool) -> None:
        self.has_tags = has_tags
        self._content = b""
        self._is_away = False
        self.sent: list[bytes] = []
        self.server = ScriptedHttp(self._serve)
        url = f"http://{self.server.address}/clients/config.json?team=a"
        self.source = HttpConfigSource(url, 0.02, authorization="Bearer x")

    def _serve(self, question: Question) -> None:
        tag = f'"{hash(self._content)}"'
        tags = f"ETag: {tag}\r\n" if self.has_tags else ""
        if self._is_away or not self._content:
            question.answer(b"away", "503 Service Unavailable")
        elif question.target != "/clients/config.json?team=a" or "\r\nAuthorization: Bearer x\r\n" not in question.head:
            question.answer(b"", "404 Not Found")
        elif self.has_tags and f"If-None-Match: {tag}\r\n" in question.head:
            question.send(reply(b"", "304 Not Modified", tags))
        else:
            self.sent.append(self._content)
            question.send(reply(self._content, headers=tags))

    def write(self, content: str) -> None:
        self._content = content.encode()

    def away(self) -> None:
        self._is_away = True

    def back(self) -> None:
        self._is_away = False

    def stop(self) -> None:
        self.server.stop()


@pytest.fixture(params=["file", "http", "http-without-tags"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made: dict[str, Callable[[], Any]] = {
        "file": lambda: KeptFile(tmp_path),
        "http": lambda: KeptUrl(has_tags=True),
        "http-without-tags": lambda: KeptUrl(has_tags=False),
    }
    place = made[request.param]()
    yield place
    place.stop()


class Told:
    """A source of the test's own: ``tell`` gives it a document."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        self.told = Event()
        self.last: ConfigDocument | None = None
        for document in documents:
            self.tell(document)

    def tell(self, document: Any) -> None:
        self.last = ConfigDocument(document, object())
        told, self.told = self.told, Event()
        told.set()

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        while self.last is None or self.last is last:
            self.told.wait()
        return self.last


def config_of(client: Any) -> dict[str, Any]:
    stats = client.stats()
    found: dict[str, Any] = stats["config"] if isinstance(stats, dict) else stats.config
    return found


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


def test_documents_are_followed_and_the_last_good_one_stays(
    kept: Any, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kept.write(json.dumps({"trace": {"one": True}}))
    assert json.loads(kept.source.next(None).content) == {"trace": {"one": True}}
    trace = TraceLog()
    lookupd = str(broker.lookupd.http_address)
    with Producer(lookupd_http_addresses=lookupd, config_source=kept.source, trace=trace) as producer:
        assert trace.is_on("one")  # start() has waited for the first document
        assert config_of(producer)["trace"] == {"one": True}
        kept.write(json.dumps({"trace": {"two": 0.5}}))
        until(lambda: trace.is_on("two"))
        assert not trace.is_on("one")
        kept.write(json.dumps({"trace": {"three": 5}}))
        until(lambda: config_of(producer)["refused"] == 1)
        assert "three" in config_of(producer)["refusal"]
        kept.away()
        until(lambda: config_of(producer)["problem"])
        assert trace.is_on("two")
        kept.back()
        until(lambda: not config_of(producer)["problem"], timeout=60.0)
        kept.write(json.dumps({}))
        until(lambda: not trace.is_on("two"))
        if kept.has_tags:
            asked = len(kept.server.targets)
            until(lambda: len(kept.server.targets) > asked + 2)
            assert kept.sent.count(b"{}") == 1, "it is asked for again and again, and sent once"
        assert config_of(producer) == {
            "source": str(kept.source),
            "changes": 3,
            "refused": config_of(producer)["refused"],
            "problem": "",
            "refusal": "",
            "trace": {},
            "lookupds": {"add": [], "remove": []},
        }
    changed = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "config_changed"]
    assert [each.partition(str(kept.source))[2] for each in changed] == [
        ": trace one: as the program says -> on",
        ": trace one: on -> as the program says; trace two: as the program says -> 50 %",
        ": trace two: 50 % -> as the program says",
    ]
    events = [getattr(each, "event", "") for each in caplog.records]
    assert events.count("config_away") == events.count("config_back") == 1


def test_a_source_that_is_away_at_the_start_is_said_and_waited_for(
    tmp_path: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.toml"
    trace = TraceLog()
    with Producer([broker.nsqd.tcp_address], config_source=FileConfigSource(path, 0.02), trace=trace) as producer:
        assert "going on without it until it answers" in caplog.text
        producer.publish("topic", b"body")
        path.write_text("trace = { topic = true }\n")
        until(lambda: trace.is_on("topic"))
    assert caplog.text.count("cannot be read") == 1


def test_a_source_of_the_programs_own(broker: Broker, no_unseen_errors: list[Any]) -> None:
    source = Told({"trace": {"topic": True}})
    assert isinstance(source, ConfigSource)
    trace = TraceLog()
    with Producer([broker.nsqd.tcp_address], config_source=source, trace=trace) as producer:
        assert trace.is_on("topic")
        source.tell(["no", "document"])
        until(lambda: config_of(producer)["refused"] == 1)
        assert trace.is_on("topic")
        source.last = "no ConfigDocument"  # type: ignore[assignment]
        source.told.set()
        until(lambda: config_of(producer)["refused"] == 2)
        source.tell({"lookupds": {"add": ["127.0.0.1:1"]}, "trace": {"topic": False}})
        until(lambda: config_of(producer)["refused"] == 3)
        assert "made without lookupd_http_addresses" in config_of(producer)["refusal"]
        assert trace.is_on("topic"), "a document is applied as a whole or not at all"


def test_lookupds_are_added_and_removed_while_messages_flow(start_consumer: Callable[..., Consumer]) -> None:
    source = Told({})
    taken: list[bytes] = []
    with Broker() as first, Broker() as second:
        old, new = str(first.lookupd.http_address), str(second.lookupd.http_address)
        options: dict[str, Any] = {"lookupd_http_addresses": [old], "config_source": source}
        consumer = start_consumer("topic", "channel", message_handler=noting(taken), **options)
        with Producer(**options) as producer:
            for number in range(100):
                producer.publish("topic", b"%d" % number)
            with Producer([second.nsqd.tcp_address]) as elsewhere:
                for number in range(100, 200):
                    elsewhere.publish("topic", b"%d" % number)
            until(lambda: "topic" in second.lookupd.db.topics())
            source.tell({"lookupds": {"add": [new]}})
            until(lambda: len(taken) == 200)
            source.tell({"lookupds": {"add": [new], "remove": [old]}})
            until(lambda: set(producer.stats()["connected"]) == {str(second.nsqd.tcp_address)})
            for number in range(200, 300):
                producer.publish("topic", b"%d" % number)
            until(lambda: len(taken) == 300)
        assert sorted(taken, key=int) == [b"%d" % number for number in range(300)]
        assert config_of(consumer)["lookupds"] == {"add": [new], "remove": [old]}


def test_a_share_of_the_messages_is_traced_and_the_same_one_by_both(
    cluster: RedesignedCluster, lookups: dict[str, Any], start_consumer: Callable[..., Consumer], new_trace: Any
) -> None:
    cluster.create_topic("topic", 2, channels=["channel"])
    (of_producer, publishes), (of_consumer, deliveries) = new_trace(), new_trace()
    options: dict[str, Any] = {"config_source": Told({"trace": {"topic": 0.25}}), **lookups}
    taken: list[int] = []
    handle = lambda _, message: taken.append(message.trace_id)  # noqa: E731
    start_consumer("topic", "channel", message_handler=handle, trace=of_consumer, **options)
    count = 2000
    with Producer(trace=of_producer, **options) as producer:
        for _ in range(count // 2):
            producer.publish("topic", b"body")
        producer.multipublish("topic", [b"body"] * (count // 2))
    until(lambda: len(taken) == count)
    published = {each.trace_id for each in publishes if isinstance(each, PublishRecord)}
    # Ids are spread evenly over the share: far from 500 is what chance cannot do.
    assert 350 < len(published) < 650
    until(lambda: published <= {each.trace_id for each in deliveries})
    assert {each.trace_id for each in deliveries if each.trace_id} == published


def test_what_is_no_source_is_refused() -> None:
    for source in (5, "file.json", object()):
        with pytest.raises(ConfigError, match="must have a method next"):
            Producer("127.0.0.1:1", config_source=source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: HttpConfigSource("ftp://host/x"), "must be http://host:port/path"),
        (lambda: HttpConfigSource("http://me:secret@host/x"), "no user name or password"),
        (lambda: HttpConfigSource("http://host/x", interval=0), "interval=0: must be a number of seconds above 0"),
    ],
    ids=["scheme", "password", "interval"],
)
def test_sources_refuse_what_they_cannot_use(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make()
    assert "secret" not in str(caught.value)


def test_a_document_that_is_too_long_is_refused_by_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (3 << 20))
    with Producer(free_address(), config_source=FileConfigSource(path)) as producer:
        refusal = until(lambda: producer.stats()["config"]["refusal"])
    assert refusal.endswith("it has more than 1048576 bytes")
