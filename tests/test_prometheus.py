"""A real Prometheus scrapes a program; the queries of the dashboard and the alert rules are evaluated by it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from support.waiting import WAIT, until

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "prometheus"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not (PROMETHEUS and PROMTOOL), reason="prometheus and promtool are not installed: apt-get install prometheus"
    ),
]

# A producer and a consumer at work, until their nsqd goes; it writes where its metrics are.
PROGRAM = """
import signal
import gevent
from gevent.event import Event
from prometheus_client import start_http_server
from nsq_fast import Consumer, Producer
from nsq_fast.broker import NsqdServer
from nsq_fast.metrics import ClientCollector

nsqd = NsqdServer()
nsqd.start()
address, metrics, is_over = str(nsqd.tcp_address), ClientCollector(), Event()
consumer = Consumer("orders", "billing", address, message_handler=lambda consumer, message: None, histograms=True)
paused = Consumer("orders", "paused", address, message_handler=lambda consumer, message: None)
producer = Producer(address, histograms=True)
metrics.add_consumer("billing", consumer)
metrics.add_consumer("paused", paused)
metrics.add_producer("web", producer)
consumer.start(block=False)
paused.start(block=False)
paused.pause()
producer.start()
server, thread = start_http_server(0, "127.0.0.1")
print(server.server_port, flush=True)
gevent.signal_handler(signal.SIGUSR1, is_over.set)
while not is_over.wait(0.02):
    producer.publish("orders", b"x")
nsqd.stop()
Event().wait()
"""

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 200ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: nsq
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.fixture(scope="module")
def program() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, and the port of its metrics."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def ask(
    program: tuple[subprocess.Popen[str], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """Ask Prometheus, which has what the program gave it a few times: ``ask("query?query=up")`` gives its data."""
    folder = tmp_path_factory.mktemp("prometheus")
    config, log = folder / "prometheus.yml", folder / "log"
    config.write_text(CONFIG.format(port=program[1], rules=EXAMPLES / "alerts.yml"))
    command = [
        str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "GOMAXPROCS": "1"})
    try:
        port = until(
            lambda: re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text()), about=log.read_text
        )

        def get(path: str) -> Any:
            with urlopen(f"http://127.0.0.1:{port[1]}/api/v1/{path}", timeout=WAIT) as reply:
                return json.load(reply)["data"]

        def has_scraped() -> bool:
            with suppress(HTTPError):  # 503: it is still starting
                return bool(get(f"query?query={quote('sum_over_time(up[1m]) > 2')}")["result"])
            return False

        until(has_scraped, 2 * WAIT, 0.1, log.read_text)
        yield get
    finally:
        process.kill()
        process.wait()


def queries() -> Iterator[str]:
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_each_query_of_the_dashboard_shows_something(ask: Callable[[str], Any]) -> None:
    found = {expr: ask(f"query?query={quote(expr)}")["result"] for expr in queries()}
    assert len(found) > 20
    assert [expr for expr, series in found.items() if not series] == []
    values = {expr: [one["value"][1] for one in series] for expr, series in found.items()}
    assert [expr for expr, shown in values.items() if "NaN" in shown] == []


def test_times_are_plausible(ask: Callable[[str], Any]) -> None:
    for metric in ("consumer_handler", "consumer_message_age", "producer_publish"):
        times = quote(f"histogram_quantile(0.5, sum by (le) (nsq_fast_{metric}_seconds_bucket))")
        (median,) = ask(f"query?query={times}")["result"]
        assert 0 < float(median["value"][1]) < WAIT


def test_a_consumer_that_does_nothing_is_shown_with_its_reason_and_told_of(ask: Callable[[str], Any]) -> None:
    (panel,) = (each for each in json.loads((EXAMPLES / "dashboard.json").read_text())["panels"] if each["id"] == 9)
    shown = quote(panel["targets"][0]["expr"])

    def reasons() -> set[tuple[str, str]]:
        found = ask(f"query?query={shown}")["result"]
        return {(each["metric"]["consumer"], each["metric"]["reason"]) for each in found}

    until(lambda: ("paused", "max_in_flight_zero") in reasons(), 2 * WAIT, 0.1, reasons)

    def told() -> list[dict[str, Any]]:
        return [
            each["labels"] for each in ask("alerts")["alerts"] if each["labels"]["alertname"] == "NsqConsumerStalled"
        ]

    until(
        lambda: [each["reason"] for each in told() if each["consumer"] == "paused"] == ["max_in_flight_zero"],
        2 * WAIT,
        0.1,
        told,
    )


def test_the_rules_are_evaluated_and_one_sees_that_the_nsqd_is_gone(
    ask: Callable[[str], Any], program: tuple[subprocess.Popen[str], int]
) -> None:
    def rules() -> dict[str, Any]:
        return {rule["name"]: rule for group in ask("rules")["groups"] for rule in group["rules"]}

    until(lambda: all(rule["health"] == "ok" for rule in rules().values()), 2 * WAIT, 0.1)
    assert len(rules()) > 10
    program[0].send_signal(signal.SIGUSR1)
    until(lambda: rules()["NsqConsumerWithoutConnection"]["state"] in {"pending", "firing"}, 2 * WAIT, 0.1, rules)


def test_promtool_has_no_complaint(program: tuple[subprocess.Popen[str], int]) -> None:
    with urlopen(f"http://127.0.0.1:{program[1]}/metrics", timeout=WAIT) as reply:
        ours = b"".join(line for line in reply if b"nsq_fast_" in line)
    for arguments, given in ((["check", "metrics"], ours), (["check", "rules", str(EXAMPLES / "alerts.yml")], b"")):
        checked = subprocess.run([str(PROMTOOL), *arguments], input=given, capture_output=True, timeout=WAIT)
        assert checked.returncode == 0, checked.stdout + checked.stderr


OUTDATED = """
rule_files: ["{rules}"]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: nsq_fast_consumer_messages_outdated_total{{consumer="prices", topic="t", channel="c"}}
        values: 0 0 0 5x14
    alert_rule_test:
      - {{eval_time: 2m, alertname: NsqMessagesOutdated}}
      - eval_time: 5m
        alertname: NsqMessagesOutdated
        exp_alerts:
          - exp_labels: {{severity: warning, consumer: prices, topic: t, channel: c}}
            exp_annotations: {{summary: s, description: d}}
      - {{eval_time: 16m, alertname: NsqMessagesOutdated}}
"""


def test_messages_that_are_too_old_are_told_of_until_there_are_no_more(tmp_path: Path) -> None:
    rules = tmp_path / "alerts.yml"
    text = (EXAMPLES / "alerts.yml").read_text()
    found = re.search(r"NsqMessagesOutdated\n.*?summary: (.*?)\n\s*description: (.*?)\n", text, re.DOTALL)
    assert found is not None
    rules.write_text(text.replace(found[1], "s").replace(found[2], "d"))
    (tmp_path / "test.yml").write_text(OUTDATED.format(rules=rules))
    done = subprocess.run([str(PROMTOOL), "test", "rules", tmp_path / "test.yml"], capture_output=True, timeout=WAIT)
    assert done.returncode == 0, done.stdout + done.stderr
