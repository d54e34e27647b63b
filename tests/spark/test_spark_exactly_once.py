"""docs/spark-examples.md, "Exactly once into NSQ": its programs, killed when a batch is published and not committed."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.spark_driver import BESIDE, Driver, Program
from support.spark_settings import ROOT
from support.waiting import until

from nsq_fast import NsqdHTTPClient, Producer
from nsq_fast.broker import BrokerProcess, ClusterProcess

PAGE = (ROOT / "docs" / "spark-examples.md").read_text().partition("## Exactly once into NSQ")[2]
REDESIGNED, ORIGINAL, CONSUMER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BODIES = {f"order {number}" for number in range(300)}
# The program of the page, whose first batch is held when all of it is published, in the first run.
RUN = """
from support.spark_program import arguments, marks

at = marks()
def held(publish):
    def wrapped(rows, batch):
        publish(rows, batch)
        at.reach("published")
        if batch == 0 and at.once("killed"):
            at.hold("here")
    return wrapped
exec(arguments()["source"])
"""


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    with BrokerProcess() as broker, ClusterProcess(nodes=1, lookupds=1, kind=True) as cluster:
        with NsqdHTTPClient(*broker.nsqd.http) as client:
            for topic, channel in (("orders", "bills"), ("bills", "ledger")):
                client.create_topic(topic)
                client.create_channel(topic, channel)
        cluster.create_topic("orders", 2, 1, multi_part=True, channels=["bills"])
        cluster.create_topic("bills", 2, 1, multi_part=True, ext=True, channels=["ledger"])
        yield {"original": str(broker.lookupd.http), "redesigned": str(cluster.lookupds[0].http)}


def here(text: str, lookupd: str, folder: Path) -> str:
    assert "127.0.0.1:4161" in text
    return text.replace("127.0.0.1:4161", lookupd).replace("/var/lib", str(folder))


def test_a_kill_between_publish_and_commit_doubles_no_effect(
    servers: dict[str, str], spark_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    programs = {}
    for kind, text in (("original", ORIGINAL), ("redesigned", REDESIGNED)):
        folder = tmp_path / kind
        (folder / "orders").mkdir(parents=True)
        assert "foreachBatch(publish)" in text
        text = here(text, servers[kind], folder).replace("foreachBatch(publish)", "foreachBatch(held(publish))")
        programs[kind] = Program(RUN, folder, source=text)
        with Producer(lookupd_http_addresses=servers[kind]) as producer:
            producer.multipublish("orders", [body.encode() for body in sorted(BODIES)])
    driver = spark_driver(BESIDE, programs=[each.given for each in programs.values()])
    driver.start()
    for each in programs.values():
        driver.wait_mark("here", marks=each.marks)
    driver.kill()
    driver.start()
    driver.wait()
    for kind, lookupd in servers.items():
        assert effects(lookupd, tmp_path / kind) == sorted(BODIES), kind


def effects(lookupd: str, folder: Path) -> list[str]:
    """What a consumer, the program of the page, has in its ledger when it has had all messages, copies too."""
    process = subprocess.Popen([sys.executable, "-c", here(CONSUMER, lookupd, folder)], cwd=ROOT)
    try:
        until(lambda: finished(lookupd) == 2 * len(BODIES), 120, 0.1)
    finally:
        process.kill()
        process.wait()
    with closing(sqlite3.connect(folder / "orders" / "ledger.db")) as ledger:
        return sorted(text for (text,) in ledger.execute("SELECT text FROM bills"))


def finished(lookupd: str) -> int:
    """Messages that the consumer has finished."""
    with urlopen(f"http://{lookupd}/nodes", timeout=10) as reply:
        found = json.load(reply)
    count = 0
    for node in (found.get("data") or found)["producers"]:
        with urlopen(f"http://{node['broadcast_address']}:{node['http_port']}/stats?format=json", timeout=10) as reply:
            stats = json.load(reply)
        for topic in (stats.get("data") or stats)["topics"]:
            if topic["topic_name"] == "bills":
                for each in topic["channels"]:
                    count += topic["message_count"] - each["depth"] - each["in_flight_count"]
    return count
