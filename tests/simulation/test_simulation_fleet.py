"""bench/fleet.py: questions about fleets, their pictures, and the check against real servers."""

from __future__ import annotations

from pathlib import Path

import fleet
import pytest
from click.testing import CliRunner
from fleet import Case, simulated
from support.servers import find_server


def test_a_question_prints_its_size_and_figures_and_draws_its_curves(tmp_path: Path) -> None:
    found = CliRunner().invoke(fleet.command, ["leaders", "--scale", "0.01", "--svg", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "30 partitions that move at 5 s" in found.output
    assert "order kept, none lost: yes" in found.output
    assert (tmp_path / "fleet-leaders.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(("distance", "code", "word"), [(0.05, 0, "agrees"), (0.2, 1, "too far")])
def test_a_check_fails_where_a_curve_is_too_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distance: float, code: int, word: str
) -> None:
    made = [fleet.Check(Case("a case", 1, 0.1), distance, 1.0, 1.1)]
    monkeypatch.setattr(fleet, "check", lambda folder: iter(made))
    found = CliRunner().invoke(fleet.command, ["--check", str(tmp_path)])
    assert found.exit_code == code
    assert f"a case: curves at most {distance:.1%} apart ({word})" in found.output


@pytest.mark.real
def test_on_real_nsqds_the_same_messages_are_handled_as_in_virtual_time() -> None:
    nsqd = find_server("nsqd")
    if nsqd is None:
        pytest.skip("there is no nsqd")
    case = Case("a small one", 20, 0.001, nsqds=2, consumers=3, uneven=3)
    real = fleet.measured(case, nsqd.parent)
    assert [curve.total for curve in real.curves] == [curve.total for curve in simulated(case)] == [60, 20]
    assert len(real.starts) == 3
    assert min(real.starts) == 0.0
