"""The programs of docs/redesigned.md run as they stand: only the address of the nsqlookupd is changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.fleet import Fleet

ROOT = Path(__file__).parents[2]
PUBLISH, CONSUME, ADMIN, TRACE = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "redesigned.md").read_text(), re.DOTALL
)
LIMIT = 30.0


def start(program: str, lookupd: str, folder: Path) -> subprocess.Popen[str]:
    program = program.replace("127.0.0.1:4161", lookupd)
    command = [sys.executable, "-u", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


def test_the_programs_publish_consume_and_trace(embedded_fleet: Fleet, tmp_path: Path) -> None:
    lookupd = embedded_fleet.lookupds[0]
    embedded_fleet.create_topic("orders", 3, 2, channels=("billing",), ordered=True)
    consumer = start(CONSUME, lookupd, tmp_path)
    try:
        producer = start(TRACE + PUBLISH, lookupd, tmp_path)
        output, errors = producer.communicate(timeout=LIMIT)
        assert (errors, len(output.splitlines())) == ("", 1)
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline() for _ in range(3)]
        outcome, errors = start(ADMIN, lookupd, tmp_path).communicate(timeout=LIMIT)
        assert (errors, outcome.count(" True ")) == ("", 3)
    finally:
        consumer.kill()
        consumer.communicate()
    assert [line.split()[-1] for line in lines] == ["b'created'", "b'paid'", "b'sent'"]
    assert " 4711 " in lines[2]
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 3
