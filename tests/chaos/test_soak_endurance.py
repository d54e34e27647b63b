"""The endurance run: it goes on after a kill, and sees what grows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.endurance import Sample, growth, load
from support.waiting import WAIT, until

from nsq_fast.errors import ConfigError

ROOT = Path(__file__).parents[2]


def sample(number: int, segment: int = 0, **more: int) -> Sample:
    held = {"resident_kib": 40_000, "files": 9, "greenlets": 12, "objects": 50_000, **more}
    return Sample(segment=segment, total=number, again=0, seconds=1.0, **held)


@pytest.mark.parametrize("name", ["resident_kib", "files", "greenlets", "objects"])
def test_what_grows_with_the_messages_is_said(name: str) -> None:
    growing = [sample(number, **{name: 40_000 + 1000 * number}) for number in range(40)]
    (said,) = growth(growing)
    assert said.startswith(f"segment 0: {name} grew from 60,000 to 79,000, by more than")


def test_what_fills_at_the_start_and_what_another_process_holds_is_no_growth() -> None:
    first = [sample(0, resident_kib=1), sample(1, resident_kib=20_000), *(sample(number) for number in range(2, 10))]
    second = [sample(number, segment=1, resident_kib=90_000) for number in range(10, 20)]
    assert list(growth([*first, *second])) == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("hello\n")
    with pytest.raises(ConfigError, match="is no file of an endurance run"):
        load(tmp_path / "state")
    assert load(tmp_path / "none") == []


@pytest.mark.timeout(240)
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    program = [sys.executable, "tests/chaos/endurance.py", "--chunk", "1000", "--state", str(state)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
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
