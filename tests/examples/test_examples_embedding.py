"""The programs of examples/embedding, each in a process of its own, against a broker in another.

Where a program does without gevent, gevent cannot be imported in its process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import PROCESS, until

import nsq_fast
from nsq_fast import NsqdHTTPClient
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast.broker import BrokerProcess, ClusterProcess

ROOT = Path(nsq_fast.__file__).parent.parent
EXAMPLES = Path(__file__).parents[2] / "examples" / "embedding"
# What `python SCRIPT ARGUMENTS` does, without gevent and what stands on it.
NO_GEVENT = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})

class NoGevent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gevent", "greenlet") or name == "nsq_fast.client":
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, NoGevent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(lookupd=False) as process:
        yield process


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", NO_GEVENT, str(EXAMPLES / script), *map(str, arguments)]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def run(process: subprocess.Popen[str], text: str = "") -> str:
    """Feed a program, wait for its end, and return what it printed."""
    printed, errors = process.communicate(text, timeout=PROCESS)
    assert (process.returncode, errors) == (0, "")
    return printed


def printed(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().split()[0] for _ in range(count)]


def depth(broker: BrokerProcess, topic: str, channel: str | None = None) -> tuple[int, int]:
    """How many messages wait, and how many are in flight."""
    with NsqdHTTPClient(*broker.nsqd.http) as client:
        topics = client.stats(topic=topic)["topics"]
    found = topics[0] if topics else {"depth": 0}
    if channel is None:
        return found["depth"], 0
    (found,) = [each for each in found["channels"] if each["channel_name"] == channel]
    return found["depth"], found["in_flight_count"]


def publish(broker: BrokerProcess, topic: str, bodies: list[str]) -> None:
    with NsqdHTTPClient(*broker.nsqd.http) as client:
        client.multipublish(topic, [body.encode() for body in bodies])


WORDS = [f"word{number}" for number in range(300)]


@pytest.mark.parametrize("script", ["asyncio_producer.py", "blocking_publisher.py"])
def test_publishers(broker: BrokerProcess, start: Start, script: str) -> None:
    topic = script.partition(".")[0]
    run(start(script, broker.nsqd.tcp, topic), "\n".join(WORDS))
    assert depth(broker, topic) == (len(WORDS), 0)


@pytest.mark.parametrize("script", ["asyncio_consumer.py", "tornado_reader.py"])
def test_consumers_finish_what_they_print(broker: BrokerProcess, start: Start, script: str) -> None:
    if script.startswith("tornado"):
        pytest.importorskip("tornado")
    topic = script.partition(".")[0]
    publish(broker, topic, WORDS)
    consumer = start(script, broker.nsqd.tcp, topic, "channel")
    assert sorted(printed(consumer, len(WORDS))) == sorted(WORDS)
    until(lambda: depth(broker, topic, "channel") == (0, 0))
    consumer.send_signal(signal.SIGINT)
    run(consumer)


def test_the_asyncio_consumer_connects_again(start: Start, tmp_path: Path) -> None:
    with BrokerProcess(lookupd=False, data_path=tmp_path) as broker:
        publish(broker, "t", ["before"])
        consumer = start("asyncio_consumer.py", broker.nsqd.tcp, "t", "c")
        assert printed(consumer, 1) == ["before"]
        until(lambda: depth(broker, "t", "c") == (0, 0))
        broker.restart()
        publish(broker, "t", ["after"])
        until(lambda: printed(consumer, 1) == ["after"])  # a broker that was killed may deliver the first one again
        consumer.send_signal(signal.SIGINT)
        _, errors = consumer.communicate(timeout=PROCESS)
        assert consumer.returncode == 0
        assert "again in" in errors


def test_the_asyncio_clients_speak_the_redesigned_dialect(start: Start) -> None:
    with ClusterProcess(nodes=1, lookupds=1) as cluster:
        cluster.create_topic("t", partitions=2, ordered=True, channels=["c"])
        nsqd = cluster.nsqds[0].tcp
        run(start("asyncio_producer.py", nsqd, "t", "--partition", 1), "\n".join(WORDS))
        consumer = start("asyncio_consumer.py", nsqd, "t", "c", "--partition", 1, "--ordered")
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline().split() for _ in WORDS]
        assert [body for body, _ in lines] == WORDS
        offsets = [int(offset) for _, offset in lines]
        assert offsets == sorted(set(offsets))
        consumer.send_signal(signal.SIGINT)
        run(consumer)


@pytest.mark.slow
def test_the_cython_counter(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    folder = tmp_path / "counter"
    shutil.copytree(EXAMPLES / "cython_counter", folder, ignore=shutil.ignore_patterns("build", "*.c", "*.so"))
    frames = [encode_message(1000 + number, 1 + number % 2, bytes(16), b"body") for number in range(9)]
    recording = tmp_path / "recording"
    recording.write_bytes(b"".join([*frames, encode_frame(0, b"OK"), encode_frame(1, b"E_INVALID"), frames[0][:7]]))

    def python(*arguments: str) -> str:
        command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python("setup.py", "build_ext", "--inplace")
    assert python("count.py", str(recording)).split() == ["9", "4", "36", "1000", "1"]


@pytest.mark.parametrize("script", ["asyncio_consumer.py", "asyncio_producer.py"])
def test_the_asyncio_examples_stay_small(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 120
