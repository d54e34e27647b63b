"""Logs of programs that run day and night: events, JSON lines, counted repeats, and no secret in any of them."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import until_async
from support.scripted_nsqd import ScriptedConnection, ScriptedNsqd, ignore
from support.waiting import PROCESS, WAIT, until
from support.wire import error_frame, frame

import nsq_fast
from nsq_fast import Consumer, Message, NsqdHTTPClient, Producer, aio, log_events, threads
from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.logs import JsonFormatter, RepeatLimiter, make_handler

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nsq_fast"
PROGRAMS = {"cli", "bench"}  # what they log is their output
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"logger", "log", "_log", "_logger"}
CONSTANTS = {name: value["event"] for name, value in vars(log_events).items() if name.isupper()}


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in PROGRAMS or "log" not in path.read_text():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                owner = ast.unparse(node.func.value).rpartition(".")[2]
                if owner in LOGGERS:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


# Events


def test_each_log_call_names_its_event_and_the_page_has_each_and_no_other() -> None:
    calls = dict(log_calls())
    named = {place: [ast.unparse(k.value) for k in call.keywords if k.arg == "extra"] for place, call in calls.items()}
    assert [place for place, names in named.items() if len(names) != 1 or names[0] not in CONSTANTS] == []
    used = {CONSTANTS[name] for names in named.values() for name in names}
    assert used == set(CONSTANTS.values()), "each event has a call"
    rows = re.findall(r"^\| `(\w+)` \| .+ \|$", (ROOT / "docs" / "logs.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(CONSTANTS.values())


class Kept(logging.Handler):
    """Keeps records, and what they are as text and as JSON, with their stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines += [logging.Formatter("%(message)s").format(record), JsonFormatter().format(record)]

    def events(self) -> set[Any]:
        return {getattr(record, "event", None) for record in self.records}


@contextmanager
def all_records() -> Iterator[Kept]:
    """Everything that nsq_fast logs, however little it matters."""
    kept, logger = Kept(), logging.getLogger("nsq_fast")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    try:
        yield kept
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)


def test_the_records_of_a_program_carry_their_events() -> None:
    def handle(consumer: object, message: Any) -> None:
        if message.body == b"bad":
            raise ValueError("bad")

    with NsqdServer() as nsqd, all_records() as kept:
        address = str(nsqd.tcp_address)
        with (
            Producer(address) as producer,
            Consumer("orders", "billing", address, message_handler=handle, max_tries=1, requeue_delay=0),
        ):
            producer.publish("orders", b"good")
            producer.publish("orders", b"bad")
            until(lambda: "message_given_up" in kept.events())
    assert kept.events() <= set(CONSTANTS.values())
    assert {"connected", "subscribed", "handler_failed", "backoff_began", "disconnected"} <= kept.events()


# JSON


def test_what_a_server_says_again_and_again_is_logged_ever_more_seldom() -> None:
    """As a leader without its replicas that refuses a FIN and ends the connection, each second for minutes."""

    def refuse(connection: ScriptedConnection, _: Any) -> None:
        if len(server.connections) <= 16:
            connection.send(error_frame(b"E_FIN_FAILED x") + error_frame(b"E_FAILED_ON_NOT_WRITABLE "))
            connection.close()

    server = ScriptedNsqd({"version": "0.3.7-HA.1.9.9"}, {b"RDY": refuse})
    options = {"message_handler": ignore, "max_reconnect_delay": 0.01}
    with all_records() as kept, Consumer("t", "c", server.address, **options):
        server.connection(16)
    server.stop()
    events = [getattr(record, "event", None) for record in kept.records if record.levelno >= logging.WARNING]
    assert [events.count(event) for event in ("response_failed", "server_error", "subscription_lost")] == [5, 5, 5]


def record_of(text: Any, *args: Any, level: int = logging.INFO, name: str = "app", **more: Any) -> logging.LogRecord:
    return logging.getLogger(name).makeRecord(name, level, "file.py", 1, text, args, None, extra=more or None)


def test_a_line_has_the_documented_keys() -> None:
    record = record_of("%s: connected", "a:4150", **log_events.CONNECTED)
    record.created = 1.5
    assert json.loads(JsonFormatter({"service": "billing"}).format(record)) == {
        "service": "billing",
        "time": "1970-01-01T00:00:01.500000+00:00",
        "level": "INFO",
        "logger": "app",
        "event": "connected",
        "message": "a:4150: connected",
    }
    assert json.loads(JsonFormatter().format(record_of("x")))["event"] is None


def test_the_stack_of_an_exception_is_one_value() -> None:
    record = record_of("failed")
    try:
        raise ValueError("bad")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: bad")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary(),
        st.builds(object), st.just(CYCLE), st.builds(ValueError, st.text()),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.one_of(st.text(), st.integers(), st.none()), inner)),
    max_leaves=5,
)  # fmt: skip
NAMES = st.text("abcdefgh", min_size=1, max_size=3)


@settings(max_examples=40)
@given(text=st.text(st.characters()), more=st.dictionaries(NAMES, VALUES))
def test_whatever_is_logged_is_one_line_of_json(text: str, more: dict[str, Any]) -> None:
    line = JsonFormatter().format(record_of(text, **more))
    assert len(line.splitlines()) == 1 or not re.search(r"[\r\n]", line)
    line.encode()
    decoded = json.loads(line)
    assert set(decoded) == {"time", "level", "logger", "event", "message", *more}


def test_a_handler_writes_text_or_json() -> None:
    for format, shown in (("text", "INFO app -: x\n"), ("json", '"message":"x"}\n')):
        stream = io.StringIO()
        make_handler(format, stream).handle(record_of("x"))
        assert stream.getvalue().endswith(shown)
    with pytest.raises(ConfigError, match="format='xml': must be 'text' or 'json'"):
        make_handler("xml")


# Repeats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Limited:
    """A limiter whose interval of ten seconds is over when a test says so."""

    def __init__(self, first: int = 2) -> None:
        self.kept = Kept()
        self.clock = Clock()
        self.limiter = RepeatLimiter(self.kept, first, 1000.0, clock=self.clock)

    def log(self, text: Any, *args: Any, times: int = 1, **more: Any) -> None:
        for _ in range(times):
            self.limiter.handle(record_of(text, *args, **more))

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.kept.records]


@pytest.fixture
def limited() -> Iterator[Limited]:
    made = Limited()
    yield made
    made.limiter.close()


def test_repeats_are_counted_and_said(limited: Limited) -> None:
    limited.log("%s: lost", "a", times=1205)
    limited.log("%s: lost", "b")
    assert limited.texts() == ["a: lost", "a: lost"]
    limited.clock.now += 1000.0
    limited.log("something else")
    assert limited.texts()[2:] == ["b: lost ... and 1,204 more in 1e+03 s", "something else"]
    assert limited.kept.records[2].repeats == 1204
    limited.log("%s: lost", "c")
    assert limited.texts()[-1] == "c: lost", "a new interval begins"


def test_only_the_same_text_is_a_repeat(limited: Limited) -> None:
    for _ in range(2):
        limited.log("a")
        limited.log("b")
        limited.log("a", name="other")
        limited.log("a", level=logging.ERROR)
    limited.log({"a": "trace record"}, times=100)
    assert len(limited.texts()) == 108


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 600)), max_size=60), st.integers(1, 4))
def test_nothing_is_left_out_unsaid(steps: list[tuple[str, float]], first: int) -> None:
    limited = Limited(first)
    for text, pause in steps:
        limited.clock.now += pause
        limited.log(text)
    limited.limiter.close()
    for text in "abc":
        said = [record for record in limited.kept.records if record.getMessage().startswith(text)]
        assert sum(getattr(record, "repeats", 1) for record in said) == sum(step[0] == text for step in steps)


def test_what_was_left_out_is_said_although_nothing_more_is_logged() -> None:
    kept = Kept()
    limiter = RepeatLimiter(kept, 1, 0.05)
    limiter.handle(record_of("a"))
    limiter.handle(record_of("a"))
    until(lambda: len(kept.records) == 2)
    limiter.close()


def test_threads_may_log_at_once() -> None:
    limited = Limited(5)
    threads = [threading.Thread(target=limited.log, args=("a",), kwargs={"times": 500}) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: not any(thread.is_alive() for thread in threads))
    limited.limiter.close()
    assert len(limited.kept.records) == 6
    assert limited.kept.records[-1].repeats == 1995


@pytest.mark.fork
def test_a_child_counts_anew() -> None:
    limited = Limited(1)
    limited.log("a", times=3)
    begin, end = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            limited.log("a")
            limited.limiter.close()
            os.write(end, json.dumps(limited.texts()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(end)
    with os.fdopen(begin) as said:
        assert json.load(said) == ["a", "a"], "one of the parent, and its own"
    limited.limiter.close()
    assert limited.texts() == ["a", "a ... and 2 more in 0 s"]


PROGRAM = """
from gevent import monkey
{patch}
import logging
from nsq_fast.logs import make_handler
logging.basicConfig(level=logging.INFO, handlers=[make_handler("json", first=2, interval=60)])
for number in range(1000):
    logging.warning("number %d", number)
"""


@pytest.mark.parametrize("patch", ["", "monkey.patch_all()"], ids=["unpatched", "patched"])
def test_the_end_of_a_program_says_what_was_left_out(patch: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(patch=patch)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    said = [line["message"].partition(" in ")[0] for line in lines]
    assert said == ["number 0", "number 1", "number 999 ... and 998 more"]
    assert lines[-1]["repeats"] == 998


SLOW = """
from gevent import monkey
monkey.patch_all()
import logging, time
from contextlib import ExitStack
from threading import Thread
import nsq_fast.threads
from nsq_fast.broker import Broker, InThread

class Collector(logging.Handler):
    "It waits while it sends a record over the network, and holds its lock meanwhile."
    def emit(self, record):
        begun.add(record.event)
        time.sleep(0.2)  # sleep: as long as the network takes
        print(record.event, flush=True)

def wait(probe):
    while not probe():
        time.sleep(0.01)  # sleep: looks again and again

begun = set()
with ExitStack() as servers:
    broker = servers.enter_context(InThread(Broker))
    consumer = {consumer}("t", "c", str(broker.nsqd.tcp_address), message_handler=print)
    consumer.start(block=False)
    wait(lambda: any(each.is_connected for each in consumer.stats().connections))
    logging.getLogger("nsq_fast").addHandler(logging.NullHandler())
    log = logging.getLogger("nsq_fast.client")
    log.setLevel(logging.INFO)
    log.addHandler(Collector())
    Thread(target=log.warning, args=("another",), kwargs=dict(extra=dict(event="another"))).start()
    wait(lambda: "another" in begun)
    {end}
    wait(lambda: "disconnected" in begun)
    consumer.close(timeout=3600)
"""


@pytest.mark.parametrize("consumer", ["nsq_fast.Consumer", "nsq_fast.threads.Consumer"])
@pytest.mark.parametrize("end", ["servers.close()", "consumer.close(timeout=3600)"])
def test_a_handler_that_waits_in_a_patched_program_disturbs_no_connection(consumer: str, end: str) -> None:
    command = [sys.executable, "-c", SLOW.format(consumer=consumer, end=end)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=True)
    assert (ended.stdout.split(), ended.stderr) == (["another", "disconnected"], "")


RAISING = """
import logging, time
from nsq_fast.broker import Broker, InThread
from nsq_fast.threads import Consumer

class Raising(logging.Handler):
    def handle(self, record):
        raise OSError("the disk is full")

with InThread(Broker) as broker:
    consumer = Consumer("t", "c", str(broker.nsqd.tcp_address), message_handler=print)
    consumer.start(block=False)
    while not any(each.is_connected for each in consumer.stats().connections):
        time.sleep(0.01)  # sleep: looks again and again
    log = logging.getLogger("nsq_fast.client.connection")
    log.setLevel(logging.INFO)
    log.addHandler(Raising())
    consumer.close(timeout=3600)
    print("closed")
"""


class Raising(logging.Handler):
    """Of a program: what it raises, no handler of logging catches."""

    def emit(self, record: logging.LogRecord) -> None:
        raise LookupError("no collector")


def no_filter(record: logging.LogRecord) -> bool:
    raise LookupError("no collector")


@pytest.fixture(params=["handler", "filter"])
def raising(request: pytest.FixtureRequest) -> Iterator[None]:
    handler = Raising() if request.param == "handler" else logging.StreamHandler(io.StringIO())
    if request.param == "filter":
        handler.addFilter(no_filter)
    logger, level = logging.getLogger("nsq_fast"), logging.getLogger("nsq_fast").level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True)
@pytest.mark.parametrize("face", ["gevent", "threads", "asyncio"])
def test_a_log_handler_that_raises_disturbs_no_client(
    nsqd_process: Any, face: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handled: list[int] = []

    def fail_once(consumer: object, message: Message) -> None:
        handled.append(message.attempts)
        if message.attempts == 1:
            raise ValueError("again")

    async def fail_once_there(consumer: object, message: Message) -> None:
        fail_once(consumer, message)

    async def main() -> None:
        async with aio.Consumer("t", "c", nsqd_process.address, message_handler=fail_once_there, requeue_delay=0):
            async with aio.Producer(nsqd_process.address) as producer:
                await producer.publish("t", b"x")
            await until_async(lambda: handled == [1, 2])

    if face == "asyncio":
        asyncio.run(main())
    else:
        kinds: Any = threads if face == "threads" else nsq_fast
        consumer = kinds.Consumer("t", "c", nsqd_process.address, message_handler=fail_once, requeue_delay=0)
        with consumer, kinds.Producer(nsqd_process.address) as producer:
            producer.publish("t", b"x")
            until(lambda: handled == [1, 2])
    shown = capsys.readouterr().err
    assert shown.count("LookupError: no collector") < 30
    assert "Message: '%s: connected, version %s, %s'" in shown


def test_the_end_of_a_connection_does_not_depend_on_its_record() -> None:
    ended = subprocess.run([sys.executable, "-c", RAISING], capture_output=True, text=True, timeout=PROCESS, check=True)
    assert ended.stdout == "closed\n"
    assert "the disk is full" in ended.stderr


@pytest.mark.parametrize("options", [{"first": 0}, {"interval": -1}, {"interval": "10"}, {"first": True}])
def test_a_limit_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0"):
        RepeatLimiter(logging.NullHandler(), **options)


# Secrets

SECRET = "GHIJKLMNOPQRSTUVWXYZ"  # like nothing else in a record: no id, no number


def refused(secret: str, tls_files: dict[str, str], kept: Kept) -> None:
    """An nsqd refuses the secret."""
    server = ScriptedNsqd(
        info={"auth_required": True}, replies={b"AUTH": frame(1, b"E_UNAUTHORIZED AUTH no authorizations")}
    )
    with ExitStack() as end:
        end.callback(server.stop)
        try_both(kept, str(server.address), auth_secret=secret)


def auth_server_gone(secret: str, tls_files: dict[str, str], kept: Kept) -> None:
    """The embedded nsqd cannot ask its auth server."""
    with with_auth(f"http://127.0.0.1:1/auth?key={secret}") as nsqd:
        try_both(kept, str(nsqd.tcp_address), auth_secret=secret)


def auth_server_fails(secret: str, tls_files: dict[str, str], kept: Kept) -> None:
    """The auth server answers with an error, and what it was asked."""
    with NsqdServer() as other, with_auth(f"http://{other.http_address}/x") as nsqd:
        try_both(kept, str(nsqd.tcp_address), auth_secret=secret)


def no_tls(secret: str, tls_files: dict[str, str], kept: Kept) -> None:
    """The server has no TLS, so that the secret must not go over the wire; or the files of TLS are the wrong ones."""
    tls = {"cafile": tls_files["ca"]}
    with NsqdServer() as nsqd:
        try_both(kept, str(nsqd.tcp_address), auth_secret=secret, tls_v1=True, tls_options=tls)
        for wrong in (tls_files["ca"], f"/{secret}"):
            options = {**tls, "certfile": tls_files["cert"], "keyfile": wrong}
            try_both(kept, str(nsqd.tcp_address), auth_secret=secret, tls_v1=True, tls_options=options)


def lookup_gone(secret: str, tls_files: dict[str, str], kept: Kept) -> None:
    """No lookupd answers, or one without the topic."""
    with NsqdServer() as nsqd:
        for lookupd in ("127.0.0.1:1", str(nsqd.http_address)):
            try_both(kept, (), lookupd_http_addresses=lookupd, lookupd_authorization=f"Bearer {secret}")


def bodies(secret: str, tls_files: dict[str, str], kept: Kept) -> None:
    """What messages hold is not logged either, whatever goes wrong with them."""

    def fail(consumer: object, message: object) -> None:
        raise ValueError("a handler's own words")

    body = secret.encode()
    options: dict[str, Any] = {"message_handler": fail, "requeue_delay": 0}
    with NsqdServer() as nsqd, Producer(str(nsqd.tcp_address)) as producer:
        address = str(nsqd.tcp_address)
        with Consumer("t", "c", address, **options, max_tries=2, max_backoff_duration=0) as c:
            producer.publish("t", body)
            with suppress(NsqError):
                producer.publish("t", body, headers={"x": secret})
            until(lambda: c.given_up)
        with Consumer("u", "d", address, **options, max_frame_size=1024) as d:
            producer.publish("u", body * 100)
            until(lambda: d.stats().totals.received)
        with NsqdHTTPClient(*nsqd.http_address) as client, suppress(NsqError):
            client.publish("t t", body)


def with_auth(address: str) -> NsqdServer:
    """An nsqd that asks this auth server."""
    return NsqdServer(NsqdOptions(auth_http_addresses=[address]))


def try_both(kept: Kept, address: Any, **options: Any) -> None:
    """A producer and a consumer, each until it has logged what is wrong; none, where its options are."""
    with suppress(ConfigError), Producer(address, publish_timeout=WAIT, **options) as producer:
        said = len(kept.records)
        producer.publish_nowait("t", b"x")
        until(lambda: len(kept.records) > said)
        producer.close(0.01)
    with suppress(ConfigError):
        consumer = Consumer("t", "c", address, message_handler=lambda consumer, message: None, **options)
        said = len(kept.records)
        consumer.start(block=False)
        until(lambda: len(kept.records) > said)
        consumer.close(drain=False, timeout=1.0)


SCENES = [refused, auth_server_gone, auth_server_fails, no_tls, lookup_gone, bodies]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_no_secret_is_logged(scene: Callable[[str, dict[str, str], Kept], None], tls_files: dict[str, str]) -> None:
    with all_records() as kept:
        scene(SECRET, tls_files, kept)
    assert kept.lines
    assert [line for line in kept.lines if SECRET in line] == []
