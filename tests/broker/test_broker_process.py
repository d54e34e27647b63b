"""A broker here and a broker in a process of its own: addresses, faults, restarts, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http import ask
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import Broker, BrokerProcess
from nsq_fast.errors import ConfigError, NsqError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def process() -> Iterator[BrokerProcess]:
    with BrokerProcess() as broker:
        yield broker


def producers(lookupd: Any, topic: str) -> list[int]:
    answer = ask(getattr(lookupd, "http", None) or lookupd.http_address, "GET", f"/lookup?topic={topic}")
    return sorted(producer["tcp_port"] for producer in answer.json.get("producers", []))


def test_a_broker_serves_at_once_and_its_nsqds_are_registered() -> None:
    with Broker(nsqds=2) as broker:
        assert broker.lookupd is not None
        nodes = ask(broker.lookupd.http_address, "GET", "/nodes").json["producers"]
        assert sorted(node["tcp_port"] for node in nodes) == sorted(nsqd.tcp_address.port for nsqd in broker.nsqds)
        ask(broker.nsqds[1].http_address, "POST", "/topic/create?topic=t")
        until(lambda: producers(broker.lookupd, "t") == [broker.nsqds[1].tcp_address.port])


def test_a_broker_without_lookupd() -> None:
    with Broker(lookupd=False) as broker:
        assert broker.lookupd is None
        assert ask(broker.nsqd.http_address, "GET", "/ping").body == b"OK"
        assert set(broker.faults) == {"nsqd0.tcp", "nsqd0.http"}


def test_a_new_topic_has_the_channels_that_other_nsqds_have() -> None:
    with Broker(nsqds=2) as broker:
        assert broker.lookupd is not None
        first, second = broker.nsqds
        ask(first.http_address, "POST", "/topic/create?topic=t")
        ask(first.http_address, "POST", "/channel/create?topic=t&channel=c")
        assert first.wait_registered(5)
        ask(second.http_address, "POST", "/pub?topic=t", b"x")
        topic = ask(second.http_address, "GET", "/stats?format=json").json["topics"][0]
        assert [channel["channel_name"] for channel in topic["channels"]] == ["c"]


def test_an_nsqd_may_be_killed_and_started_again() -> None:
    with Broker(nsqds=2) as broker:
        assert broker.lookupd is not None
        nsqd = broker.nsqds[0]
        before = nsqd.tcp_address
        nsqd.kill()
        assert not nsqd.is_running
        until(lambda: len(ask(broker.lookupd.http_address, "GET", "/nodes").json["producers"]) == 1)
        nsqd.start()
        assert nsqd.wait_registered(5)
        assert nsqd.tcp_address == before
        assert len(ask(broker.lookupd.http_address, "GET", "/nodes").json["producers"]) == 2


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_msg_size'"):
        Broker(max_message_size=1)
    with pytest.raises(ConfigError, match="nsqds=-1"):
        Broker(nsqds=-1)


def test_a_port_in_use_is_an_error_and_nothing_stays_open() -> None:
    with Broker() as broker:
        second = Broker(tcp_address=str(broker.nsqd.tcp_address))
        with pytest.raises(OSError, match="in use"):
            second.start()
        assert second.lookupd is not None
        with pytest.raises(ConnectionRefusedError):
            ask(second.lookupd.http_address, "GET", "/ping")


def test_several_nsqds_count_up_from_a_port_that_is_given() -> None:
    broker = Broker(nsqds=3, tcp_address="127.0.0.1:4150", http_address="127.0.0.1:0")
    assert [nsqd.options.tcp_address for nsqd in broker.nsqds] == ["127.0.0.1:4150", "127.0.0.1:4160", "127.0.0.1:4170"]
    assert len({nsqd.options.node_id for nsqd in broker.nsqds}) == 3


def test_a_process_serves(process: BrokerProcess) -> None:
    assert process.is_running
    assert ask(process.nsqd.http, "GET", "/ping").body == b"OK"
    consumer = WireClient(process.nsqd.tcp)
    consumer.subscribe("t", "c")
    ask(process.nsqd.http, "POST", "/pub?topic=t", b"x")
    assert consumer.message().body == b"x"
    until(lambda: producers(process.lookupd, "t") == [process.nsqd.tcp.port])
    consumer.close()


def test_a_process_restarts_on_its_addresses_with_its_data(tmp_path: Path) -> None:
    with BrokerProcess(nsqds=2, data_path=tmp_path) as process:
        before, pid = process.nsqds, process.pid
        ask(process.nsqd.http, "POST", "/pub?topic=t", b"kept")
        process.restart()
        assert process.nsqds == before
        assert process.pid != pid
        consumer = WireClient(process.nsqd.tcp)
        consumer.subscribe("t", "c")
        assert consumer.message().body == b"kept"
        consumer.close()


def test_faults_of_a_process(process: BrokerProcess) -> None:
    process.set_faults("lookupd.http", lie=b"\xff[]")
    assert ask(process.lookupd.http, "GET", "/topics").body == b"\xff[]"
    process.set_faults("lookupd.http", lie=None)
    assert ask(process.lookupd.http, "GET", "/topics").body == b'{"topics":[]}'
    with pytest.raises(NsqError, match="no such target: nsqd7"):
        process.set_faults("nsqd7.tcp", drop_replies=True)
    with pytest.raises(NsqError, match="did you mean 'drop_replies'"):
        process.set_faults("nsqd0.tcp", drop_reply=True)


def test_options_of_a_process_that_do_not_fit() -> None:
    with pytest.raises(NsqError, match="ended, with status 1"):
        BrokerProcess(max_message_size=1).start()


def test_a_process_does_not_outlive_its_parent() -> None:
    parent = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os\n"
            "from nsq_fast.broker import BrokerProcess\n"
            "broker = BrokerProcess(lookupd=False)\n"
            "broker.start()\n"
            "print(broker.nsqd.http.port, flush=True)\n"
            "os.kill(os.getpid(), 9)",
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL
    port = int(parent.stdout)

    def is_gone() -> bool:
        try:
            return not ask(("127.0.0.1", port), "GET", "/ping")
        except OSError:
            return True

    until(is_gone)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_with_its_state_saved(tmp_path: Path, number: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "nsq_fast.broker.process", "Broker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"lookupd": False, "data_path": str(tmp_path)}).encode() + b"\n")
    child.stdin.flush()
    http = json.loads(child.stdout.readline())["nsqds"][0]["http"]
    ask(tuple(http), "POST", "/pub?topic=t", b"x")
    child.send_signal(number)
    assert child.wait(10) == 0
    child.stdin.close()
    child.stdout.close()
    with Broker(lookupd=False, data_path=tmp_path) as broker:
        assert ask(broker.nsqd.http_address, "GET", "/stats?format=json").json["topics"][0]["depth"] == 1
