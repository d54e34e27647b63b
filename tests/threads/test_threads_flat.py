"""Memory is flat however many messages cross between the hub thread and the threads and loops of a program.

NSQ_FAST_FLAT_MESSAGES says how many do: 200,000 here, 5,000,000 with `make soak`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MESSAGES = int(os.environ.get("NSQ_FAST_FLAT_MESSAGES", "200000"))


@pytest.mark.slow
@pytest.mark.timeout(300 + MESSAGES // 1000)
def test_memory_is_flat_over_many_messages_through_threads_and_asyncio(real_nsqd: Any) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "support.outside_flow", str(real_nsqd().tcp_address), str(MESSAGES)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stderr) == (0, "")
    sys.stdout.write(done.stdout)  # the curve, for who wants to see it
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    early, late = rounds[2 : len(rounds) // 2], rounds[len(rounds) // 2 :]  # the first two fill what is kept for reuse
    assert rounds[-1][0] >= 0.9 * MESSAGES
    assert max(objects for *_, objects in late) - max(objects for *_, objects in early) < 200
    assert max(resident for _, resident, _ in late) - max(resident for _, resident, _ in early) < 4096, "KiB"
