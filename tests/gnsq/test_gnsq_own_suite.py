"""gnsq's own tests, unmodified, against nsq_fast: with real servers, and with ours answering as nsqd and nsqlookupd.

Needs a checkout of gnsq's repository, named by NSQ_FAST_GNSQ, and six.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers import find_server

ROOT = Path(__file__).parents[2]
CHECKOUT = Path(os.environ.get("NSQ_FAST_GNSQ", "nowhere"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (CHECKOUT / "tests").exists(), reason="NSQ_FAST_GNSQ names no checkout of gnsq"),
    pytest.mark.skipif(importlib.util.find_spec("six") is None, reason="gnsq's tests need six"),
]


def our_servers(folder: Path) -> Path:
    for kind in ("nsqd", "nsqlookupd"):
        program = folder / kind
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsq_fast {kind} "$@"\n')
        program.chmod(0o755)
    return folder


def real_servers(folder: Path) -> Path:
    found = find_server("nsqd")
    if found is None:
        pytest.skip("no real nsqd")
    return found.parent


@pytest.mark.parametrize("servers", [real_servers, our_servers])
def test_all_of_them_pass(tmp_path, servers):
    environment = {
        **os.environ,
        "PATH": f"{servers(tmp_path)}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SLOW_TIMEOUT": "60",
    }
    pytest_arguments = ["pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "."]
    done = subprocess.run(
        [sys.executable, "-m", "nsq_fast", "run-as-gnsq", "-m", *pytest_arguments],
        cwd=CHECKOUT / "tests", env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert "108 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
