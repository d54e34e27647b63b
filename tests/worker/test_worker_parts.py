"""What a supervisor decides, on a clock of the test's own and with processes that are none."""

from __future__ import annotations

import json
import logging
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Info, generate_latest
from support.browser import Browser
from support.waiting import WAIT

from nsq_fast import Consumer
from nsq_fast.cli import main
from nsq_fast.client.progress import ConsumerProgress, TopicProgress
from nsq_fast.client.subscription import Counters
from nsq_fast.errors import ConfigError
from nsq_fast.worker import subscribe
from nsq_fast.worker.child import load
from nsq_fast.worker.health import (
    WRONG_PROGRAM,
    ConsumerReport,
    Phase,
    ProcessState,
    Report,
    Snapshot,
    Stall,
    Totals,
    not_alive,
    not_ready,
)
from nsq_fast.worker.settings import Given, Settings, SettingsReader, Subscription, WorkerConfig, declared
from nsq_fast.worker.status_page import StatusPage
from nsq_fast.worker.supervisor import GOOD_AFTER, Slot

READY = Report(Phase.RUNNING, consumers=[ConsumerReport("orders/billing", True, 1, 2)])
LOOKING = Report(Phase.RUNNING, consumers=[ConsumerReport("orders/billing", True, 0, 0)])
WAITING = Report(Phase.RUNNING, consumers=[ConsumerReport("orders/billing", True, 0, 2)])


class FakeProcess:
    """A process that does as the test says."""

    def __init__(self, number: int, now: float = 0.0) -> None:
        self.number = number
        self.report = Report()
        self.started_at = now

    def why(self, code: int) -> str:
        return f"ended with {code}"

    def drain(self) -> None:
        """It ends when the test says so."""

    def enforce(self, now: float) -> None:
        """It ends when the test says so."""


def slot_of(**options: Any) -> tuple[Slot, list[FakeProcess]]:
    started: list[FakeProcess] = []

    def start(number: int) -> Any:
        started.append(FakeProcess(number))
        return started[-1]

    slot = Slot(0, WorkerConfig(**options), start)
    slot.start()
    return slot, started


def test_pauses_before_restarts_double_up_to_the_longest_and_begin_anew_after_a_good_time() -> None:
    slot, started = slot_of(restart_delay=1.0, max_restart_delay=4.0)
    now, pauses = 0.0, []
    for lived in (0.0, 0.0, 0.0, 0.0, GOOD_AFTER, 0.0):
        process: Any = started[-1]
        process.started_at, now = now, now + lived
        slot.ended(process, -9, now)
        due = slot.due_at()
        pauses.append(due - now)
        slot.look(due - 0.01)
        assert started[-1] is process
        slot.look(due)
        assert started[-1] is not process
        now = due
    assert pauses == [1.0, 2.0, 4.0, 4.0, 1.0, 2.0]
    assert slot.restarts == 6


def test_without_a_pause_only_the_first_process_is_started_again_at_once() -> None:
    slot, started = slot_of(restart_delay=0.0)
    pauses = []
    for _ in range(3):
        slot.ended(started[-1], -9, 0.0)  # type: ignore[arg-type]
        pauses.append(slot.due_at())
        slot.look(pauses[-1])
    assert pauses == [0.0, 0.1, 0.2]


def test_what_the_system_cannot_start_is_tried_again_and_a_replacement_leaves_the_old_process() -> None:
    room: list[FakeProcess] = []

    def start(number: int) -> Any:
        if not room:
            raise BlockingIOError("no more processes")
        return room.pop()

    slot = Slot(0, WorkerConfig(restart_delay=1.0), start)
    slot.start()
    slot.look(slot.due_at())
    assert slot.current is None
    old: Any = FakeProcess(0)
    room.append(old)
    slot.look(slot.due_at())
    slot.replace()
    assert slot.has_failed
    assert (slot.current, slot.is_replacing) == (old, False)


class Asked:
    """A consumer that does as the test says, with so many topics; counts how often its progress was looked at."""

    def __init__(self, topics: int = 1) -> None:
        self.looks = 0
        self.found: tuple[Any, str] = "idle", ""
        self._topics = (TopicProgress("orders", None, "", ()),) * topics

    def progress(self) -> ConsumerProgress:
        self.looks += 1
        return ConsumerProgress(*self.found, self._topics, None)


def stalled(stall: Stall, done: Counters, after: float, now: float) -> str:
    stall.look(now)
    return stall.said(done, after, now)


def test_a_consumer_stalls_when_it_has_something_to_do_for_long_and_does_nothing() -> None:
    asked, nothing = Asked(), Counters()
    stall = Stall(asked.progress)
    asked.found = "backoff", "level 3"
    assert stalled(stall, nothing, 10.0, 100.0) == ""
    asked.found = "handlers_busy", "{2} handlers run"
    assert stalled(stall, nothing, 10.0, 109.9) == ""
    assert stalled(stall, nothing, 10.0, 110.0) == "handlers_busy for 10 s: {2} handlers run"
    assert stalled(stall, nothing, 0.0, 200.0) == ""
    for now, reason in enumerate((None, "idle", "paused_by_server"), 201):
        asked.found = reason, ""
        assert stalled(stall, nothing, 10.0, now) == ""
        asked.found = "backoff", ""
        assert stalled(stall, nothing, 10.0, now + 0.5) == ""


def test_a_consumer_of_thousands_of_topics_is_looked_at_seldom_and_what_it_does_meanwhile_counts() -> None:
    few, many = Asked(), Asked(topics=4000)
    seldom, often = Stall(many.progress), Stall(few.progress)
    many.found = "backoff", "level 3"
    done, found = Counters(), []
    for second in range(100, 400):
        done.received += second == 203  # between two looks
        for name in ("received", "finished", "skipped"):
            setattr(done, name, getattr(done, name) + (second == 355))
        found.append(bool(stalled(seldom, done, 60.0, second)))
        stalled(often, done, 60.0, second)
    assert few.looks == 300
    assert many.looks <= 300 / 10, "ten seconds for 40 us a topic are a sixtieth of a core"
    assert found[:60] == [False] * 60
    assert found[60:103] == [True] * 43, "it is said each second"
    assert found[103:163] == [False] * 60
    assert found[173:] == [True] * 127, "what is left out is no work"


def test_where_no_nsqd_is_there_the_new_process_need_not_be_ready() -> None:
    slot, (old,) = slot_of()
    old.report = WAITING
    slot.replace()
    new: Any = slot.successor
    slot.look(1.0)
    assert slot.successor is new
    new.report = WAITING
    slot.look(1.0)
    assert slot.current is new


@pytest.mark.parametrize("fails", ["is late", "dies"])
def test_a_new_process_that_fails_leaves_the_old_one(fails: str) -> None:
    slot, (old,) = slot_of(start_timeout=10.0)
    old.report = READY
    slot.replace()
    new: Any = slot.successor
    slot.look(9.9)
    assert not slot.has_failed
    slot.look(10.0) if fails == "is late" else slot.ended(new, 1, 5.0)
    assert slot.has_failed
    assert (slot.current, slot.successor) == (old, None)
    assert old not in slot.leaving


def test_a_new_process_takes_the_place_of_an_old_one_that_dies() -> None:
    slot, (old,) = slot_of()
    slot.replace()
    new: Any = slot.successor
    slot.ended(old, -9, 1.0)  # type: ignore[arg-type]
    assert not slot.has_failed
    assert slot.current is new


def test_only_a_program_that_never_ran_is_wrong() -> None:
    slot, (first,) = slot_of()
    slot.ended(first, WRONG_PROGRAM, 0.0)  # type: ignore[arg-type]
    assert slot.is_wrong
    slot, (first,) = slot_of()
    first.report = READY
    slot.look(0.0)
    slot.ended(first, WRONG_PROGRAM, 1.0)  # type: ignore[arg-type]
    assert not slot.is_wrong


def state(report: Report, at: float = 100.0, number: int = 0, is_leaving: bool = False) -> ProcessState:
    return ProcessState(number, 41, report, at, is_leaving)


@pytest.mark.parametrize(
    ("snapshot", "alive", "ready"),
    [
        (Snapshot(100.0, (state(READY),)), "", ""),
        (Snapshot(100.0, (state(WAITING),)), "", "orders/billing is connected to 0 of 2"),
        (Snapshot(100.0, (state(LOOKING),)), "", "orders/billing knows no nsqd that has its topic"),
        (Snapshot(100.0, (state(Report()),)), "", "process 0 (pid 41) is starting"),
        (Snapshot(100.0, (), missing=(0,)), "", "process 0 is to be started again"),
        (Snapshot(100.0, (state(READY),), is_stopping=True), "", "the worker is ending"),
        (Snapshot(100.0, (state(READY), state(Report()))), "", ""),
        (Snapshot(100.0, (state(READY, is_leaving=True), state(Report()))), "", "is starting"),
        (Snapshot(100.0, (state(READY, at=90.0),)), "has not turned for 10 s", "has not turned for 10 s"),
        (Snapshot(90.0, (state(READY),)), "the supervisor has done nothing for 10 s", "the supervisor"),
    ],
)
def test_a_probe_says_no_with_its_reason(snapshot: Snapshot, alive: str, ready: str) -> None:
    for expected, reasons in ((alive, not_alive(snapshot, 100.0, 5.0)), (ready, not_ready(snapshot, 100.0, 5.0))):
        assert bool(reasons) is bool(expected)
        assert expected in "; ".join(reasons)


def test_a_loop_that_does_not_turn_counts_though_its_process_reports() -> None:
    blocked = Report(Phase.RUNNING, loop_age=7.0, consumers=READY.consumers)
    assert not_alive(Snapshot(100.0, (state(blocked),)), 100.0, 5.0)


def shown(value: float, name: str = "n_total", kind: str = "counter") -> str:
    return f'# TYPE {name} {kind}\n{name}{{a="\\"1\\\\"}} {value}\n# TYPE n_created gauge\nn_created 3\n'


def samples(metrics: Iterable[Any]) -> dict[str, Any]:
    return {name: value for each in metrics for name, labels, value, *_ in each.samples if labels == {"a": '"1\\'}}


def test_counters_never_go_down_whatever_processes_come_and_go() -> None:
    chance = random.Random(17)
    past, alive, highest, total = Totals(), [0.0], 0.0, 0.0
    for _ in range(300):
        if chance.random() < 0.2:
            past = past.with_ended(shown(alive.pop(chance.randrange(len(alive)))))
            alive.append(0.0)
        elif chance.random() < 0.1:
            alive.append(0.0)
        step = float(chance.randrange(5))
        alive[chance.randrange(len(alive))] += step
        total += step
        (found,) = past.now(map(shown, alive))
        assert (found.name, samples([found])) == ("n", {"n_total": total})
        assert total >= highest
        highest = total


def test_gauges_of_processes_that_ended_are_gone_and_levels_do_not_add_up() -> None:
    level = "nsq_fast_consumer_backoff_level"
    past = Totals().with_ended(shown(5, "n", "gauge") + shown(9, level, "gauge"))
    found = past.now(shown(1, "n", "gauge") + shown(each, level, "gauge") for each in (2, 1))
    assert samples(found) == {"n": 2.0, level: 2.0}


def test_what_a_program_says_of_itself_is_said_once_however_many_processes_there_are() -> None:
    registry = CollectorRegistry()
    Info("app", "What runs.", registry=registry).info({"version": "3"})
    (found,) = Totals().now([generate_latest(registry).decode()] * 3)
    assert [(each.name, each.labels, each.value) for each in found.samples] == [("app_info", {"version": "3"}, 1.0)]


@given(st.text(), st.text(), st.floats(0, 1e9))
def test_figures_of_a_program_arrive_as_they_are(label: str, help: str, value: float) -> None:
    registry = CollectorRegistry()
    Counter("n", help, ["a"], registry=registry).labels(label).inc(value)
    (found,) = Totals().now([generate_latest(registry).decode()])
    assert found.documentation.strip() == help.strip()
    assert [(each.labels, each.value) for each in found.samples] == [({"a": label}, value)]


def consumed(at: float, *processes: tuple[int, int]) -> Snapshot:
    """Of processes of which each has finished so many messages of one consumer."""
    reports = {
        pid: Report(Phase.RUNNING, consumers=[ConsumerReport("<a>/b", True, 1, 1, done)]) for pid, done in processes
    }
    states = [ProcessState(number, pid, reports[pid], at) for number, pid in enumerate(reports)]
    return Snapshot(at, tuple(states))


def test_the_page_for_people_adds_up_processes_and_reckons_rates_of_the_last_seconds() -> None:
    page = StatusPage(timeout=60.0)
    start = monotonic()
    for second in range(20):
        page.show(consumed(start + second, (11, 100 * second), (12, 0)), Totals())
        page.show(consumed(start + second + 0.5, (11, 100 * second + 50), (12, 0)), Totals())
    page.show(consumed(start + 20, (11, 2000), (13, 1000)), Totals())  # another process in the place of 12
    text = page.html()
    cells = re.findall(r'data-name="([^"]+)">([^<]*)<', text)
    found = dict(cells[:7])
    assert found["topic/channel"] == "&lt;a&gt;/b"
    assert found["finished"] == "3,000"
    assert 250 < float(found["finished/s"]) < 350
    assert found["processes"] == "2"
    assert found["connected"] == "2 of 2"
    page.show(Snapshot(start + 21, (state(READY, start + 21), state(READY, start + 21, is_leaving=True))), Totals())
    assert re.findall(r'data-name="phase">([^<]*)<', page.html()) == ["running", "leaving"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)], ids=["wide and light", "narrow and dark"])
def test_the_page_can_be_read_on_any_screen(browser: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    reports = [ConsumerReport(name * 12 + "/shipping", True, 1, 2, 1_234_567) for name in ("order", "bill-")]
    late = Report(Phase.RUNNING, consumers=[*reports, ConsumerReport("orders/billing", True, 0, 0)])
    page = StatusPage(timeout=60.0)
    page.show(Snapshot(monotonic(), (state(late, monotonic()), state(late, is_leaving=True)), missing=(1,)), Totals())
    path = tmp_path / "page.html"
    path.write_text(page.html())
    audit = browser.audit(path, width, dark)
    assert audit.found == []
    assert audit.words > 300
    assert (sum(map(int, re.findall(r"\d+", audit.background)[:3])) < 150) is dark


@contextmanager
def listening(address: str, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """A page that is served; gives the URL that the log has."""
    caplog.set_level(logging.INFO, "nsq_fast.worker")
    page = StatusPage(timeout=60.0)
    page.listen(address)
    yield caplog.records[-1].message.partition(" has / /healthz")[0]
    page.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_it_is_said_where_pages_are_and_all_interfaces_are_those_of_ipv4_and_ipv6(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listening("[::1]:0", caplog) as url:
        assert re.fullmatch(r"http://\[::1\]:\d+", url)
    with (
        listening("[::]:0", caplog) as url,
        urlopen(f"http://127.0.0.1:{url.rpartition(':')[2]}/healthz", timeout=WAIT) as answer,
    ):
        assert answer.status == 200


def test_without_descriptors_a_request_waits_and_costs_next_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening("127.0.0.1:0", caplog) as url, socket.socket() as sock:
        (thread,) = (each for each in threading.enumerate() if each.name == "nsq_fast status")
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        sock.settimeout(WAIT)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # those of the standard streams: there is no other
        try:
            sock.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            before = time.clock_gettime(clock)
            time.sleep(1.0)  # sleep: what goes on meanwhile is the subject
            used = time.clock_gettime(clock) - before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"200 OK" in sock.recv(4096)
    assert used < 0.02


# The configuration of a worker: which source counts, and what is said of what is wrong.


FILE = """
[worker]
processes = 2
drain_timeout = 7

[consumer]
max_in_flight = 2
concurrency = 2
msg_timeout = 20

[subscription."orders/billing"]
max_in_flight = 3
concurrency = 3
"""


BILLING = Subscription("orders", "billing", print)


def read(
    tmp_path: Path, text: str = FILE, environment: dict[str, str] | None = None, flags: Sequence[Given] = ()
) -> Settings:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    return SettingsReader().read(str(path), environment or {}, flags)


def test_a_flag_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    environment = {"NSQ_FAST_PROCESSES": "4", "NSQ_FAST_HANDLERS": "threads", "NSQ_FAST_MAX_IN_FLIGHT": "40"}
    flags = [Given("processes", "8", "--processes"), Given("max_in_flight", "80", "--consumer-opt")]
    found = read(tmp_path, environment=environment, flags=flags)
    assert (found.worker.processes, found.worker.handlers, found.worker.drain_timeout) == (8, "threads", 7.0)
    assert found.options_of(BILLING)["max_in_flight"] == "80"
    assert read(tmp_path, environment=environment).worker.processes == 4
    assert read(tmp_path).worker.processes == 2
    named = SettingsReader().read(None, {"NSQ_FAST_CONFIG": str(tmp_path / "worker.toml")}, ())
    assert named == read(tmp_path)
    assert read(tmp_path, "").worker.processes == 1


def test_the_special_part_of_the_file_counts_before_the_general_one_and_that_before_the_program(tmp_path: Path) -> None:
    options = {"max_in_flight": 1, "concurrency": 1, "msg_timeout": 10, "auto_touch": True}
    billing = read(tmp_path).options_of(Subscription("orders", "billing", print, options=options))
    shipping = read(tmp_path).options_of(Subscription("orders", "shipping", print, options=options))
    chosen = [(each["max_in_flight"], each["concurrency"], each["msg_timeout"]) for each in (billing, shipping)]
    assert chosen == [(3, 3, 20), (2, 2, 20)]
    assert billing["auto_touch"] is True
    assert billing["requeue_unfinished"] is True


def test_what_becomes_of_old_messages_may_be_said_from_outside(tmp_path: Path) -> None:
    text = '[consumer]\nmax_age = 60\nmax_age_policy = "finish"\n'
    assert read(tmp_path, text).options_of(BILLING)["max_age_policy"] == "finish"
    overriding = read(tmp_path, text, {"NSQ_FAST_MAX_AGE_POLICY": "give_up"}).options_of(BILLING)
    assert (overriding["max_age"], overriding["max_age_policy"]) == (60, "give_up")


@pytest.mark.parametrize("source", ["file", "environment", "flag", "both"])
def test_tls_may_be_configured_from_outside(tmp_path: Path, tls_files: dict[str, str], source: str) -> None:
    """Its options are refused without ``tls_v1``, which may stand before them, behind them, or in another source."""
    file = f"[consumer]\ntls_options = {{cafile = {tls_files['ca']!r}}}\ntls_v1 = true\n"
    variables = {"NSQ_FAST_TLS_V1": "true"}
    as_text = json.dumps({"cafile": tls_files["ca"]})
    found = {
        "file": lambda: read(tmp_path, file),
        "environment": lambda: read(tmp_path, "", variables | {"NSQ_FAST_TLS_OPTIONS": as_text}),
        "flag": lambda: read(tmp_path, "", variables, [Given("tls_options", as_text, "--consumer-opt")]),
        "both": lambda: read(tmp_path, file.replace("tls_v1 = true", ""), variables),
    }[source]()
    options = found.options_of(BILLING)
    consumer = Consumer("orders", "billing", "127.0.0.1", message_handler=print, **options)
    assert consumer.connection_config.tls_v1
    assert consumer.connection_config.tls_options == {"cafile": tls_files["ca"]}


def test_each_wrong_key_is_named_with_its_source_and_what_is_allowed(tmp_path: Path) -> None:
    text = """
[worker]
proceses = 2
http = "nowhere"
[consumer]
max_in_flight = -1
max_age_policy = "drop"
[subscription.orders]
max_in_flight = 1
[subscription."orders/billing"]
order_policy = "maybe"
[extra]
"""
    environment = {"NSQ_FAST_DRAIN_TIMEOUT": "soon", "NSQ_FAST_NSQD_TCP_ADDRESSES": "http://host"}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, environment, [Given("log_format", "xml", "--log-format")])
    faults = str(caught.value).replace(f"{tmp_path}/", "").split("\n")
    expected = [
        ("worker.toml [worker]: unknown option 'proceses'; did you mean 'processes'?", "drain_timeout"),
        ("worker.toml [worker]: http='nowhere'", "host:port"),
        ("worker.toml [consumer]: max_in_flight=-1", "0 to 1000000"),
        ("worker.toml [consumer]: max_age_policy='drop'", "finish, give_up"),
        ("worker.toml: subscription.orders", '[subscription."topic/channel"]'),
        ('worker.toml [subscription."orders/billing"]: order_policy=', "deliver, drop, stop"),
        ("worker.toml: 'extra'", "worker, consumer, subscription"),
        ("NSQ_FAST_DRAIN_TIMEOUT: drain_timeout='soon'", "a number"),
        ("NSQ_FAST_NSQD_TCP_ADDRESSES: invalid address", "host:port"),
        ("--log-format: log_format='xml'", "text, json"),
    ]
    for where, allowed in expected:
        (fault,) = (each for each in faults if each.startswith(where))
        assert allowed in fault
    assert len(faults) == len(expected)


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ('[consumer]\nauth_secret = ["s3cret"]\nlookupd_authorization = 7\n', {}),
        ("", {"NSQ_FAST_TLS_V1": "1", "NSQ_FAST_TLS_OPTIONS": "cafile=s3cret.pem"}),
    ],
    ids=["file", "environment"],
)
def test_no_secret_is_shown(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"auth_secret='\*\*\*'|TLS_OPTIONS: tls_options: must be an object of JSON"
    ) as caught:
        read(tmp_path, text, variables)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(read(tmp_path, '[consumer]\nauth_secret = "s3cret"\n'))


def test_a_variable_that_looks_like_an_option_is_pointed_at_and_a_service_of_kubernetes_is_not(tmp_path: Path) -> None:
    reader = SettingsReader()
    environment = {
        "NSQ_FAST_PROCESES": "2",
        "NSQ_FAST_SERVICE_HOST": "10.0.0.1",
        "NSQ_FAST_PORT_9151_TCP_ADDR": "10.0.0.1",
    }
    reader.read(None, environment, ())
    assert reader.doubts == ["NSQ_FAST_PROCESES is not known and has no effect; did you mean NSQ_FAST_PROCESSES?"]


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.toml: cannot be read as TOML"):
        read(tmp_path, "processes: 2")
    with pytest.raises(ConfigError, match="'worker': must be one of the tables worker, consumer, subscription"):
        read(tmp_path, "worker = 2")
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        SettingsReader().read(str(tmp_path / "missing.toml"), {}, ())


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (("bad topic!", "c"), {}, "bad topic!"),
        (("t", "c"), {"concurency": 2}, "did you mean 'concurrency'"),
        (("t", "c"), {"place": "moon"}, "gevent, threads, asyncio"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_stands(
    arguments: tuple[str, str], options: dict[str, object], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        subscribe(*arguments, **options)  # type: ignore[arg-type]


def test_where_a_handler_runs_follows_from_its_kind() -> None:
    async def waits(consumer: object, message: object) -> None: ...

    class Waits:
        async def __call__(self, consumer: object, message: object) -> None: ...

    def runs(consumer: object, message: object) -> None: ...

    def place(handler: object, handlers: str = "gevent", **options: object) -> str:
        return Subscription("t", "c", handler, options=dict(options)).place_of(handlers)  # type: ignore[arg-type]

    assert [place(waits), place(Waits()), place(waits, "threads")] == ["asyncio"] * 3
    assert [place(runs), place(runs, "threads"), place(runs, handler_threads=2)] == ["gevent", "threads", "threads"]
    with pytest.raises(ConfigError, match="coroutine function"):
        subscribe("t", "c", place="gevent")(waits)
    assert declared(waits) == []


def test_what_a_program_has_made_itself_runs_where_its_kind_says(tmp_path: Path) -> None:
    (tmp_path / "made_app.py").write_text(
        "from nsq_fast import Consumer, aio, threads\n\nasync def handle(c, m): ...\n"
        "consumers = [kind('orders', 'billing', '127.0.0.1', message_handler=handler)\n"
        "    for kind, handler in ((Consumer, print), (threads.Consumer, print), (aio.Consumer, handle))]\n"
    )
    found = load("made_app:consumers", str(tmp_path), Settings())
    assert [each.place for each in found] == ["gevent", "threads", "asyncio"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "checked_app.py").write_text(
        "from nsq_fast.worker import subscribe\n\n@subscribe('orders', 'billing')\nasync def handle(c, m): ...\n"
    )
    return tmp_path


@pytest.mark.slow
def test_check_says_what_would_run_and_names_options_of_what_is_not_declared(
    program: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = program / "worker.toml"
    file.write_text("".join(f"[subscription.'{name}/billing']\nmax_tries = 3\n" for name in ("orders", "order")))
    command = ["run", "checked_app", "--check", "--app-dir", str(program)]
    told = CliRunner().invoke(main, [*command, "--nsqd", "127.0.0.1:4150", "--config", str(file)])
    assert told.exit_code == 0
    assert capfd.readouterr().out == "orders/billing: asyncio\n"
    (doubt,) = (line for line in told.output.splitlines() if "has no effect" in line)
    assert '[subscription."order/billing"]' in doubt
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 78
    assert "orders/billing: must specify at least one nsqd or lookupd" in result.output


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("there/app.py", "there/app.py is a path: name a module, as in nsq-fast run there.app"),
        ("./there/../app.py", "is a path: name a module, as in nsq-fast run app"),
        ("../there/app.py", "is a path: name a module, as in nsq-fast run app --app-dir ../there"),
        ("/srv/there/app.py", "is a path: name a module, as in nsq-fast run app --app-dir /srv/there"),
        ("checked_app.py", "checked_app.py is a path: name a module, as in nsq-fast run checked_app"),
        ("", "no module is named: nsq-fast run MODULE"),
    ],
)
def test_what_is_no_module_is_told_as_one(program: Path, path: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, str(program), Settings())
    assert f"{caught.value}\n".partition(word)[2] in ("\n", ", or MODULE:ATTRIBUTE\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "word"),
    [
        ("no_such_module", "there is no module 'no_such_module' in "),
        ("checked_app:nothing", "has no 'nothing'"),
        ("checked_app:__name__", "cannot be run: it must be declared with subscribe"),
        ("json", "there is nothing to run"),
    ],
)
def test_check_says_why_a_program_cannot_be_run(program: Path, app: str, word: str) -> None:
    result = CliRunner().invoke(main, ["run", app, "--check", "--app-dir", str(program), "--nsqd", "127.0.0.1"])
    assert result.exit_code == 78
    assert word in result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--processes", "0"], ["--processes: processes=0: must be a whole number, 1 to 1024"]),
        (["--nsqd", "nowhere:0"], ["--nsqd-tcp-address: invalid address 'nowhere:0'"]),
        (["--lookupd", "nowhere:0"], ["--lookupd-http-address: invalid address 'nowhere:0'"]),
        (["--consumer-opt", "x=1"], ["--consumer-opt: unknown option 'x'; allowed are ", ", max_in_flight, "]),
        (["--http", "{taken}"], ["http='{taken}': cannot listen there: Address already in use"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_a_wrong_configuration_starts_nothing(
    program: Path, closed_port: int, flags: list[str], says: list[str]
) -> None:
    taken = f"127.0.0.1:{closed_port}"
    given = [each.format(taken=taken) for each in flags]
    result = CliRunner().invoke(main, ["run", "checked_app", "--nsqd", "127.0.0.1", *given])
    assert result.exit_code == 2
    assert all(each.format(taken=taken) in result.output for each in says)
