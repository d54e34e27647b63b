"""The soak: short runs that hold, faults of the client that must be found, what it checks, and the endurance run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from chaos import clients, endurance
from chaos import run as soak_run
from chaos.__main__ import command
from chaos.clients import NSQDS, PUBLISH_GRACE, PUBLISH_TIMEOUT, Consumers, Publishers
from chaos.endurance import Sample, grown, load
from chaos.faults import CALM, Schedule
from chaos.faults import plan as schedule_of
from chaos.invariants import (
    PATIENCE,
    Bound,
    ConnectionSample,
    KeyOrder,
    Ledger,
    Resources,
    Stuck,
    decode_body,
    encode_body,
    growth,
)
from chaos.invariants import Outcome as Published
from chaos.original import MENU, Original, OriginalHandlers
from chaos.redesigned import MENU as ORDERED_MENU
from chaos.run import Outcome, Run, render
from click.testing import CliRunner, Result
from gevent.event import Event
from hypothesis import given
from hypothesis import strategies as st
from support.servers import SERVERS, find_server
from support.waiting import WAIT, until

from nsq_fast import Consumer, Message
from nsq_fast.errors import BodyInvalid, ConfigError, NoNsqd, PublishFailed

SEED = "20"
SECONDS = "40"


def soak(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["--seconds", SECONDS, "--seed", SEED, "--rate", "150", *arguments])


def check_passed(result: Result) -> None:
    assert result.exit_code == 0, result.output
    assert "PASS" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("choice", ["--dialect=original", "--dialect=redesigned"])
def test_a_soak_on_embedded_servers_holds(choice: str) -> None:
    check_passed(soak(choice))


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(300)
def test_a_soak_on_real_servers_holds() -> None:
    nsqd, lookupd = find_server("nsqd"), find_server("nsqlookupd")
    if nsqd is None or lookupd is None:
        pytest.skip(f"no real nsqd and nsqlookupd below {SERVERS}")
    check_passed(soak("--dialect", "original", "--servers", str(nsqd.parent)))


QUIET = Schedule(0, 1.0, (), ((0.0, 1.0),))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An original scene on embedded servers, of which a test makes the client misbehave."""
    monkeypatch.setattr(soak_run, "DRAIN_TIMEOUT", 8.0)
    monkeypatch.setattr(soak_run, "SETTLE_TIMEOUT", 2.0)
    with Original(tmp_path, 100.0) as original:
        yield original


def violations(scene: Any) -> str:
    return "\n".join(Run(scene, QUIET, lambda line: None).go(Event()).violations)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(), NSQDS], ids=["quiet", "connections end at last"])
def test_nothing_planted_is_nothing_found(scene: Any, monkeypatch: pytest.MonkeyPatch, cut: tuple[str, ...]) -> None:
    publish_some, to_cut = scene.publish_some, iter(cut)

    def cut_and_publish(count: int) -> None:
        for name in to_cut:
            scene.links.fault(name, "cut")
        publish_some(count)

    monkeypatch.setattr(scene, "publish_some", cut_and_publish)
    outcome = Run(scene, QUIET, lambda line: None).go(Event())
    assert outcome.violations == []
    assert outcome.passed


@pytest.mark.slow
def test_messages_that_are_lost_held_for_ever_or_hidden_are_found(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish_without_handling(self: OriginalHandlers, consumer: Consumer, message: Message) -> None:
        number = scene.consumers.number(message)
        if number is None or number % 10:
            scene.consumers.finish(consumer.channel, number)

    def hold_for_ever(self: OriginalHandlers, consumer: Consumer, messages: Any) -> None:
        for message in messages:
            message.enable_async()

    def hide_that_it_is_unknown(self: Publishers, numbers: Any, began: float, wait: Any) -> bool:
        wait()
        self._ledger.mark(numbers, Published.REFUSED if numbers[0] % 10 == 1 else Published.STORED)
        return False

    monkeypatch.setattr(OriginalHandlers, "handle_plainly", finish_without_handling)
    monkeypatch.setattr(OriginalHandlers, "handle_batch", hold_for_ever)
    monkeypatch.setattr(Publishers, "record", hide_that_it_is_unknown)
    found = violations(scene)
    assert "plain: " in found
    assert scene.ledger.lost("plain")[:2] == [0, 10]
    assert scene.ledger.lost("few") == []
    assert "the nsqds still hold: " in found
    assert "batches in flight" in found
    assert "publish said not stored" in found


@pytest.mark.slow
def test_statistics_that_are_wrong_and_a_close_that_takes_too_long_are_found(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Consumers.accounts
    calls = iter(range(10**6))

    def accounts(self: Consumers) -> Any:
        more = next(calls)
        return {name: each._replace(finished=each.finished + more) for name, each in truth(self).items()}

    monkeypatch.setattr(Consumers, "accounts", accounts)
    monkeypatch.setattr(clients, "CLOSE_GRACE", -clients.CLOSE_TIMEOUT)  # so that any time is too long
    found = violations(scene)
    assert "plain: counts " in found
    assert "close(timeout=10) took" in found


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "PASS"), ({"violations": ["a promise"]}, "FAIL"), ({"is_interrupted": True}, "INTERRUPTED")],
    ids=["well", "violated", "interrupted"],
)
def test_the_last_line_says_what_came_of_it(changes: dict[str, Any], verdict: str) -> None:
    resources = [resources_of()] * 2
    values = {"violations": [], "channels": {"few": {"finished": 3}}, "resources": resources, **changes}
    lines = render(Outcome("original", 1, 3600.0, {"kill": 2}, {"stored": 9}, garbled=0, **values)).splitlines()
    assert lines[-1] == verdict
    assert "few: 3 finished" in lines
    assert [line for line in lines if "a promise" in line] == ["VIOLATED  a promise"] * len(values["violations"])


def test_the_schedule_is_printed_and_nothing_is_run() -> None:
    result = CliRunner().invoke(command, ["--schedule", "--seed", "3", "--hours", "0.1"])
    assert result.exit_code == 0
    again = CliRunner().invoke(command, ["--schedule", "--seed", "3", "--seconds", "360"])
    assert again.output == result.output
    assert "original, seed 3, 180 s" in result.output
    assert "redesigned, seed 3, 180 s" in result.output
    for kind in ("kill", "freeze", "move", "garble"):
        assert kind in result.output


# The invariants of a soak: each kind of violation is planted once, and must be found; what is right passes.


CHANNELS = ("one", "two")


def published(count: int = 3, place: int = 0) -> Ledger:
    ledger = Ledger(CHANNELS)
    ledger.mark(ledger.begin(place, count), Published.STORED)
    return ledger


def finish(ledger: Ledger, *numbers: int, channels: tuple[str, ...] = CHANNELS) -> None:
    for channel in channels:
        for number in numbers:
            ledger.mark_finished(channel, number)


def test_a_message_answered_ok_that_one_channel_never_finished_is_lost() -> None:
    ledger = published()
    finish(ledger, 0, 1, 2, channels=("one",))
    finish(ledger, 0, 2, channels=("two",))
    assert not ledger.is_done()
    assert ledger.violations() == ["two: 1 messages answered OK were never finished: 1 (nsqd 0)"]


def test_a_message_that_came_though_its_publish_said_not_stored_is_a_ghost() -> None:
    ledger = Ledger(CHANNELS)
    first, second = ledger.begin(), ledger.begin()
    ledger.mark(first, Published.REFUSED)
    ledger.mark_finished("one", first[0])  # after the publish said so
    ledger.mark_finished("one", second[0])  # and before
    ledger.mark(second, Published.REFUSED)
    assert ledger.violations() == ["2 messages came whose publish said not stored: 0, 1"]


def test_a_killed_nsqd_takes_what_it_alone_had_and_nothing_else() -> None:
    ledger = published(2, place=0)
    ledger.mark(ledger.begin(1, 2), Published.STORED)
    finish(ledger, 0)
    ledger.mark_killed(0)
    ledger.mark(ledger.begin(0, 1), Published.STORED)  # published to it after it was started again
    assert ledger.forgiven == {"one": {1}, "two": {1}}
    assert ledger.lost("one") == [2, 3, 4]
    finish(ledger, 2, 3, 4)
    assert ledger.is_done()
    assert ledger.violations() == []


def raises(error: Exception) -> Callable[[], None]:
    def publish() -> None:
        raise error

    return publish


def test_the_outcome_of_a_publish_is_what_its_error_says() -> None:
    ledger = Ledger(CHANNELS)
    publishers = Publishers(ledger)
    assert publishers.record(ledger.begin(), monotonic(), lambda: b"OK")
    for error in (PublishFailed("unknown", possibly_stored=True), PublishFailed("refused"), NoNsqd("nowhere")):
        assert not publishers.record(ledger.begin(), monotonic(), raises(error))
    assert [ledger.count(each) for each in Published] == [0, 1, 1, 2]
    assert publishers.violations == []


def test_a_publish_that_takes_too_long_is_told() -> None:
    publishers = Publishers(published())
    publishers.record((0,), monotonic() - PUBLISH_TIMEOUT - PUBLISH_GRACE - 1, lambda: b"OK")
    (told,) = publishers.violations
    assert told.startswith("a publish took ")


def test_an_error_that_a_publish_must_not_raise_is_told() -> None:
    publishers = Publishers(published())
    publishers.record((0,), monotonic(), raises(BodyInvalid("what")))
    assert publishers.violations == ["a publish raised BodyInvalid: what"]


def test_a_first_delivery_after_a_later_one_is_a_violation_of_its_key_alone() -> None:
    order = KeyOrder()
    for key, sequence in ((1, 0), (2, 0), (1, 2), (2, 1), (1, 1)):
        order.delivered(key, sequence)
    assert order.violations == ["key 1: message 1 came after 2"]


def test_handlers_side_by_side_are_seen() -> None:
    bound = Bound("handlers", 1)
    with bound.turn("one partition"), bound.turn("another"):
        assert bound.violations == []
    with bound.turn("one partition"):
        assert bound.violations == []
        with bound.turn("one partition"):
            assert bound.violations == ["handlers: 2, at most 1 allowed"]


def test_what_is_kept_of_messages_that_are_over_is_little() -> None:
    """Of each some bytes: a run of hours has millions, and its memory has to stay level."""
    ledger, order = Ledger(CHANNELS), KeyOrder()
    tracemalloc.start()
    try:
        for sequence in range(20_000):
            order.delivered(1, sequence)
            numbers = ledger.begin()
            ledger.mark(numbers, Published.STORED)
            finish(ledger, *numbers)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def connection(rdy: int = 0, in_flight: int = 0, connected: bool = True, excused: bool = False) -> ConnectionSample:
    return ConnectionSample("c", "n:1", connected, rdy, in_flight, excused)


@pytest.mark.parametrize(
    ("sample", "says"),
    [(connection(), "RDY 0, nothing in flight"), (connection(connected=False), "not connected")],
    ids=["RDY 0", "not connected"],
)
def test_a_connection_that_stays_without_messages_in_a_calm_is_stuck(sample: ConnectionSample, says: str) -> None:
    stuck = Stuck()
    stuck.sample(0.0, [sample])
    stuck.sample(50.0, [sample])  # in a storm that may be
    stuck.begin_calm(100.0)
    stuck.sample(100.0 + PATIENCE - 1, [sample])
    assert stuck.violations == []
    stuck.sample(100.0 + PATIENCE, [sample])
    stuck.sample(101.0 + PATIENCE, [sample])
    assert stuck.violations == [f"c, nsqd n:1: {says}, {PATIENCE:.0f} s into a calm"]


@pytest.mark.parametrize("well", [connection(rdy=1), connection(in_flight=1), connection(excused=True), None], ids=str)
def test_a_connection_that_works_or_may_rest_or_goes_is_not_stuck(well: ConnectionSample | None) -> None:
    stuck = Stuck()
    stuck.begin_calm(0.0)
    for now in range(0, 60, 4):
        stuck.sample(float(now), [connection()])
        stuck.sample(now + 2.0, [well] if well else [])
    assert stuck.violations == []


def test_a_bound_that_was_passed_once_is_told() -> None:
    bound = Bound("messages held", 10)
    for value in (3, 10):
        bound.sample(value)
    assert bound.violations == []
    bound.sample(11)
    bound.sample(0)
    assert bound.violations == ["messages held: 11, at most 10 allowed"]


def resources_of(**more: int) -> Resources:
    return Resources(**{"resident_kib": 40_000, "files": 9, "greenlets": 12, "objects": 50_000, **more})


@pytest.mark.parametrize("limits", [soak_run.LEVEL, endurance.LEVEL], ids=["soak", "endurance"])
def test_resources_that_grow_are_told(limits: dict[str, int]) -> None:
    before = resources_of()
    level = {name: getattr(before, name) + more for name, more in limits.items()}
    assert growth([before], [resources_of(**level)], limits) == []
    for name in limits:
        (told,) = growth([before], [resources_of(**{name: level[name] + 1}), before], limits)
        assert told.startswith(f"{name} grew from ")


@given(st.integers(0, 10**6), st.data())
def test_a_changed_body_gives_nothing(number: int, data: st.DataObject) -> None:
    body = bytearray(encode_body(number))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    assert decode_body(bytes(body)) is None
    assert decode_body(bytes(body[:at])) is None


# The schedule: a seed gives it whole, and it keeps its own rules

seeds = st.integers(0, 10**6)
lengths = st.floats(2 * CALM + 1, 3000)


@given(seeds, lengths, st.sampled_from([MENU, ORDERED_MENU]))
def test_a_seed_gives_the_same_faults_each_time(seed: int, seconds: float, menu: object) -> None:
    assert schedule_of(seed, seconds, menu) == schedule_of(seed, seconds, menu)


# The endurance run: it goes on after a kill, and sees what grows.


ROOT = Path(__file__).parents[2]


def sample(number: int, segment: int = 0, **more: int) -> Sample:
    return Sample(segment=segment, total=number, again=0, seconds=1.0, held=resources_of(**more))


def test_what_grows_with_the_messages_is_said() -> None:
    growing = [sample(number, objects=40_000 + 1000 * number) for number in range(40)]
    assert list(grown(growing)) == ["segment 0: objects grew from 60,000 to 79,000, by more than 2,000"]


def test_what_fills_at_the_start_and_what_another_process_holds_is_no_growth() -> None:
    first = [sample(0, resident_kib=1), sample(1, resident_kib=20_000), *(sample(number) for number in range(2, 10))]
    second = [sample(number, segment=1, resident_kib=90_000) for number in range(10, 20)]
    assert list(grown([*first, *second])) == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("hello\n")
    with pytest.raises(ConfigError, match="is no file of an endurance run"):
        load(tmp_path / "state")
    assert load(tmp_path / "none") == []


@pytest.mark.timeout(240)
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    program = [sys.executable, "-m", "chaos.endurance", "--chunk", "1000", "--state", str(state)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    first = subprocess.Popen(
        [*program, "--messages", "100000000"],
        cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: len(load(state)) >= 3, WAIT)
    finally:
        os.killpg(first.pid, signal.SIGKILL)  # its server, too
        first.wait()
    with state.open("ab") as file:
        file.write(b'{"segment":0,"tot')  # a line that the kill has cut off
    killed = load(state)
    total = killed[-1].total + 3000
    done = subprocess.run(
        [*program, "--messages", str(total)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3 * WAIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{total:,} messages in 2 segments" in done.stdout
    samples = load(state)
    assert samples[: len(killed)] == killed
    assert [(each.segment, each.total) for each in samples[len(killed) :]] == [
        (1, total - 2000), (1, total - 1000), (1, total)
    ]  # fmt: skip
