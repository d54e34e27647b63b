"""Soaks: short ones that hold, and ones with a planted fault of the client that must fail."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from chaos import clients
from chaos import run as soak_run
from chaos.__main__ import command
from chaos.clients import Consumers, Publishers
from chaos.invariants import Resources
from chaos.original import Original, OriginalHandlers
from chaos.run import WIDTH, Outcome, Run, render
from chaos.schedule import Schedule
from click.testing import CliRunner, Result
from gevent.event import Event
from support.servers import SERVERS, find_server

from nsq_fast import Consumer, Message

SEED = "20"
SECONDS = "40"


def soak(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["--seconds", SECONDS, "--seed", SEED, "--rate", "150", *arguments])


def check_passed(result: Result) -> None:
    assert result.exit_code == 0, result.output
    assert "PASS" in result.stdout
    assert all(len(line) <= WIDTH for line in result.stdout.splitlines())


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
    outcome = Run(scene, QUIET, lambda line: None).go(Event())
    assert not outcome.passed
    assert outcome.violations
    return "\n".join(outcome.violations)


@pytest.mark.slow
def test_nothing_planted_is_nothing_found(scene: Any) -> None:
    outcome = Run(scene, QUIET, lambda line: None).go(Event())
    assert outcome.violations == []
    assert outcome.passed


@pytest.mark.slow
def test_a_consumer_that_finishes_without_handling_is_found(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: OriginalHandlers, consumer: Consumer, message: Message) -> None:
        number = scene.consumers.number(message)
        if number is None or number % 10:
            scene.consumers.finish(consumer, number)

    monkeypatch.setattr(OriginalHandlers, "handle_plainly", handle)
    assert "plain: " in violations(scene)
    assert scene.ledger.lost("plain")[:2] == [0, 10]
    assert scene.ledger.lost("batches") == []


@pytest.mark.slow
def test_a_consumer_that_holds_messages_for_ever_is_found(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(self: OriginalHandlers, consumer: Consumer, message: Message) -> None:
        message.enable_async()

    monkeypatch.setattr(OriginalHandlers, "handle_plainly", handle)
    assert "the nsqds still hold: " in violations(scene)


@pytest.mark.slow
def test_a_publish_that_hides_that_its_outcome_is_unknown_is_found(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: Publishers, numbers: Any, began: float, wait: Any) -> bool:
        wait()
        self._ledger.mark_refused(numbers)
        return False

    monkeypatch.setattr(Publishers, "record", record)
    assert "publish said not stored" in violations(scene)


@pytest.mark.slow
def test_statistics_that_are_wrong_are_found(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Consumers.accounts
    calls = iter(range(10**6))

    def accounts(self: Consumers) -> Any:
        more = next(calls)
        return {name: each._replace(finished=each.finished + more) for name, each in truth(self).items()}

    monkeypatch.setattr(Consumers, "accounts", accounts)
    assert "plain: counts " in violations(scene)


@pytest.mark.slow
def test_a_close_that_takes_too_long_is_found(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLOSE_GRACE", -clients.CLOSE_TIMEOUT)  # so that any time is too long
    assert "close(timeout=10) took" in violations(scene)


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "name": "original, embedded",
        "seed": 12345,
        "seconds": 3600.0,
        "faults": dict.fromkeys(("kill", "stop", "freeze", "delay", "split", "blackhole", "refuse", "cut"), 1000),
        "publishes": dict.fromkeys(("answered OK", "outcome unknown", "of these stored", "not stored"), 12_345_678),
        "channels": {
            name: dict.fromkeys(("finished", "twice", "forgiven", "lost"), 12_345_678) for name in ("handlers", "few")
        },
        "garbled": 12_345_678,
        "resources": [Resources(1 << 33, 100_000, 100_000)] * 2,
        "violations": [],
    }
    return Outcome(**{**values, **changes})


def test_the_table_fits_eighty_columns_and_says_what_came_of_it() -> None:
    for each, verdict in (
        (outcome(), "PASS"),
        (outcome(violations=["a sentence that is far too long for one line of eighty columns " * 3]), "FAIL"),
        (outcome(is_interrupted=True), "INTERRUPTED"),
        (outcome(faults={}, channels={}, resources=[]), "PASS"),
    ):
        lines = render(each).splitlines()
        assert max(map(len, lines)) <= WIDTH
        assert lines[-1] == verdict


def test_a_violation_is_shown_whole() -> None:
    text = " ".join(f"word{number}" for number in range(40))
    shown = render(outcome(violations=[text]))
    assert text in " ".join(textwrap.dedent(shown).split())


def test_the_schedule_is_printed_and_nothing_is_run() -> None:
    result = CliRunner().invoke(command, ["--schedule", "--seed", "3", "--hours", "0.1"])
    assert result.exit_code == 0
    again = CliRunner().invoke(command, ["--schedule", "--seed", "3", "--seconds", "360"])
    assert again.output == result.output
    assert "original, seed 3, 180 s" in result.output
    assert "redesigned, seed 3, 180 s" in result.output
    for kind in ("kill", "freeze", "move", "garble"):
        assert kind in result.output
