"""bench/fleet.py: each question of docs/scale.md has an answer, which holds in its direction in a small fleet, too."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import fleet
import pytest


def figure(answer: fleet.Answer, what: str) -> str:
    """The only figure whose words begin so."""
    (found,) = [value for name, value in answer.figures if name.startswith(what)]
    return found


def first_number(text: str) -> float:
    return float(text.split()[0].rstrip(",").replace(",", ""))


@cache
def answered(name: str) -> fleet.Answer:
    answer = fleet.QUESTIONS[name](0.003, "7")
    assert all(len(line.points) >= 30 for line in answer.lines)
    assert all(what and value for what, value in answer.figures)
    return answer


def test_jitter_spreads_polls_that_began_together_and_a_restart_is_got_over() -> None:
    answer = answered("lookup")
    together, spread = (first_number(figure(answer, f"lookupd_poll_jitter {each}: peak")) for each in ("0", "0.3"))
    assert spread <= together
    assert first_number(figure(answer, "all lookupds down from 120 to 130 s: in the last minute")) >= 0


def test_with_room_for_every_connection_no_message_of_a_hot_nsqd_waits() -> None:
    answer = answered("turns")
    for room in ("as many as connections", "2.5 times as many"):
        assert figure(answer, f"{room}: wait").startswith("0.0")


def test_all_are_connected_again_soon_after_an_nsqd_is_back() -> None:
    answer = answered("reconnects")
    for how in ("down for 10 s", "flaps, 4 s down, 4 s up"):
        assert first_number(figure(answer, f"{how}: all connected")) < 60.0


def test_publishes_keep_their_order_and_none_is_lost_while_leaders_move() -> None:
    answer = answered("leaders")
    for seconds in (1, 3, 8):
        assert figure(answer, f"a new leader after {seconds} s: order") == "yes"
        assert seconds <= first_number(figure(answer, f"a new leader after {seconds} s: longest")) < seconds + 3.0


def test_backoff_spares_a_bad_downstream() -> None:
    answer = answered("backoff")
    calls = "calls that the bad downstream got a second"
    assert first_number(figure(answer, f"max_backoff_duration 128, the default: {calls}")) < 10
    assert first_number(figure(answer, f"no backoff: {calls}")) > 50


def test_the_same_seed_gives_the_same_answer() -> None:
    assert fleet.QUESTIONS["leaders"](0.003, "7") == answered("leaders")


@pytest.mark.parametrize("scale", ["-1", "0", "nan", "inf"])
def test_a_fleet_of_no_size_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scale: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet.py", "--scale", scale, "--charts", str(tmp_path / "charts")])
    with pytest.raises(SystemExit, match="2"):
        fleet.main()
    assert "must be more than 0" in capsys.readouterr().err
    assert not (tmp_path / "charts").exists()
