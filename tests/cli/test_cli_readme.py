"""The programs of the README run as they stand: only the address of the nsqlookupd is changed.

The consumer is one of gevent, the producer one of asyncio.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from nsq_fast.broker import BrokerProcess

README = Path(__file__).parents[2] / "README.md"
CONSUMER, PRODUCER, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
LIMIT = 30.0


def start(program: str, lookupd: str) -> subprocess.Popen[str]:
    assert "127.0.0.1:4161" in program
    program = program.replace("127.0.0.1:4161", lookupd)
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=README.parent
    )


def test_the_programs_are_as_short_as_they_say() -> None:
    assert len(CONSUMER.splitlines()) <= 15
    assert len(PRODUCER.splitlines()) <= 15


def test_the_consumer_prints_what_the_producer_publishes_and_ends_at_ctrl_c() -> None:
    expected = {"hello", "hello in a while", *(f"hello {number}" for number in range(100))}
    with BrokerProcess() as broker:
        lookupd = str(broker.lookupd.http)
        producer = start(PRODUCER, lookupd)
        assert producer.communicate(timeout=LIMIT) == ("", "")
        assert producer.returncode == 0
        consumer = start(CONSUMER, lookupd)
        timer = threading.Timer(LIMIT, consumer.kill)
        timer.start()
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline() for _ in expected]
        consumer.send_signal(signal.SIGINT)
        assert consumer.communicate(timeout=LIMIT) == ("", "")
        timer.cancel()
        assert consumer.returncode == 0
    assert {line.rstrip("\n") for line in lines} == {f"1 {text}" for text in expected}
