"""The recipes of docs/cookbook, and the tutorial: each program runs as it stands, and does what its page says.

Only the addresses are changed, to those of an embedded broker in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import trustme
from support.recipes import files_of
from support.waiting import until

from nsq_fast import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.threads import Producer

ROOT = Path(__file__).parent.parent
LIMIT = 60.0


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        yield process


@pytest.fixture
def broker(shared_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """It knows no topic when a test is over."""
    yield shared_broker
    nsqd = NsqdHTTPClient.from_url(str(shared_broker.nsqds[0].http))
    lookupd = LookupdHTTPClient.from_url(str(shared_broker.lookupd.http))
    with nsqd, lookupd:
        for topic in nsqd.stats()["topics"]:
            nsqd.delete_topic(topic["topic_name"])

        def are_forgotten() -> bool:
            topics = lookupd.topics()["topics"]
            for topic in topics:
                lookupd.delete_topic(topic)
            return not topics

        until(are_forgotten)


class Kitchen:
    """A folder with the programs of a page, and the processes that run there."""

    def __init__(self, folder: Path, page: str, broker: BrokerProcess | ClusterProcess) -> None:
        self.folder = folder
        for name, text in files_of(page).items():
            text = text.replace("127.0.0.1:4161", str(broker.lookupd.http))
            (folder / name).write_text(text.replace("127.0.0.1:4150", str(broker.nsqds[0].tcp)))

    @contextmanager
    def running(self, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        timer = threading.Timer(LIMIT, process.kill)  # so that a read of its output ends
        timer.start()
        try:
            yield process
        finally:
            process.terminate()  # not killed at once: it may have children of its own
            process.communicate()
            timer.cancel()

    def output(self, *arguments: str) -> str:
        """What a program writes that ends by itself, and well."""
        with self.running(*arguments) as process:
            output, errors = process.communicate()
            assert process.returncode == 0, errors
            return output


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def logged(process: subprocess.Popen[str], pattern: str) -> Iterator[str]:
    """What the group of ``pattern`` matches in the lines of its log."""
    assert process.stderr is not None
    return (found[1] for line in process.stderr if (found := re.search(pattern, line)))


def terminated(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM. It has to end well."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors


def publish(broker: BrokerProcess, topic: str, *bodies: bytes) -> None:
    with Producer(str(broker.nsqds[0].tcp)) as producer:
        producer.multipublish(topic, list(bodies))


def test_a_task_of_celery_is_retried_by_nsqd(broker: BrokerProcess, tmp_path: Path) -> None:
    pytest.importorskip("celery")
    kitchen = Kitchen(tmp_path, "cookbook/tasks", broker)
    kitchen.output("-c", "import shop; shop.bill.delay(1)")
    with kitchen.running("-m", "celery", "-A", "shop", "worker", "--pool", "solo") as worker:
        assert worker.stderr is not None  # where Celery writes what a task prints
        assert any("billed" in line for line in worker.stderr)


def test_tasks_of_taskiq_run_in_its_worker(broker: BrokerProcess, tmp_path: Path) -> None:
    pytest.importorskip("taskiq")
    kitchen = Kitchen(tmp_path, "cookbook/tasks", broker)
    kitchen.output("jobs.py")
    with kitchen.running("-m", "taskiq", "worker", "jobs:broker", "--workers", "1") as worker:
        assert sorted(lines(worker, 2)) == ["shrunk cat.png", "shrunk dog.png"]


def test_a_chain_of_faststream(broker: BrokerProcess, tmp_path: Path) -> None:
    pytest.importorskip("faststream")
    shown = Kitchen(tmp_path, "cookbook/tasks", broker).output("stream.py")
    assert "mailed {'number': 1, 'sum': 30}" in shown.splitlines()


def test_code_that_blocks_runs_in_threads(broker: BrokerProcess, tmp_path: Path) -> None:
    publish(broker, "orders", *(b"%d" % number for number in range(20)))
    with Kitchen(tmp_path, "cookbook/handlers", broker).running("blocking.py") as consumer:
        assert set(islice(logged(consumer, r"handled (\d+)"), 20)) == {str(number) for number in range(20)}
        terminated(consumer)


def test_batches_are_in_the_database(broker: BrokerProcess, tmp_path: Path) -> None:
    bodies = [b"%d" % number for number in range(1000)]
    publish(broker, "orders", *bodies)
    with Kitchen(tmp_path, "cookbook/handlers", broker).running("archive.py") as consumer:
        until(lambda: not broker.messages("orders"), LIMIT)
        terminated(consumer)
    found = sqlite3.connect(tmp_path / "orders.db").execute("SELECT body FROM orders").fetchall()
    assert {body for (body,) in found} == set(bodies)
    assert len(found) == len(bodies)


def test_a_payment_that_comes_twice_is_booked_once(broker: BrokerProcess, tmp_path: Path) -> None:
    payments = [{"id": "a", "account": "ada", "cents": 5}, {"id": "b", "account": "ada", "cents": 7}]
    publish(broker, "payments", *(json.dumps(each).encode() for each in [*payments, *payments]))
    with Kitchen(tmp_path, "cookbook/handlers", broker).running("once.py") as consumer:
        until(lambda: not broker.messages("payments"), LIMIT)
        terminated(consumer)
    assert sqlite3.connect(tmp_path / "accounts.db").execute("SELECT * FROM accounts").fetchall() == [("ada", 12)]


def test_dead_letters_are_looked_at_and_sent_again(broker: BrokerProcess, tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path, "cookbook/handlers", broker)
    publish(broker, "orders", b'{"number": 1}', b"no JSON")
    lookupd = ("--lookupd", str(broker.lookupd.http))
    with kitchen.running("dead_letters.py") as consumer:
        assert lines(consumer, 1) == ["order 1"]
        until(lambda: broker.messages("orders_dead") == [b"no JSON"], LIMIT)
        shown = kitchen.output("-m", "nsq_fast", "tail", "orders_dead", *lookupd, "--take-backlog", "--json", "-n", "1")
        assert json.loads(shown)["body"] == "no JSON"
        publish(broker, "orders_dead", b'{"number": 2}')  # what somebody has mended
        mended = kitchen.output("-m", "nsq_fast", "tail", "orders_dead", *lookupd, "--channel", "tail", "-n", "1")
        publish(broker, "orders", mended.strip().encode())
        assert lines(consumer, 1) == ["order 2"]
        terminated(consumer)


@pytest.mark.parametrize(
    ("page", "program", "line"),
    [("handlers", "later.py", "remind Ada"), ("moving", "from_go_nsq.py", "billed 1")],
    ids=["a reminder when it is due", "a program of go-nsq"],
)
def test_a_line_comes_by_and_by(broker: BrokerProcess, tmp_path: Path, page: str, program: str, line: str) -> None:
    with Kitchen(tmp_path, f"cookbook/{page}", broker).running(program) as consumer:
        assert lines(consumer, 1) == [line]
        terminated(consumer)


def test_topics_that_match_are_consumed_and_new_ones_found(broker: BrokerProcess, tmp_path: Path) -> None:
    publish(broker, "shop_orders", b"a book")
    publish(broker, "other", b"nothing")
    with Kitchen(tmp_path, "cookbook/handlers", broker).running("audit.py") as consumer:
        assert lines(consumer, 1) == ["shop_orders a book"]
        publish(broker, "shop_returns", b"the book")
        assert lines(consumer, 1) == ["shop_returns the book"]
        terminated(consumer)


def test_messages_of_a_key_come_in_order(tmp_path: Path) -> None:
    with ClusterProcess(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=4, replicas=2, ordered=True)
        with Kitchen(tmp_path, "cookbook/handlers", cluster).running("ordered.py") as consumer:
            shown = [line.split(" ", 1) for line in lines(consumer, 6)]
            terminated(consumer)
    for customer in ("ada", "bob"):
        own = [(partition, text) for partition, text in shown if text.startswith(customer)]
        assert [text for _, text in own] == [f"{customer} {step}" for step in ("created", "paid", "sent")]
        assert len({partition for partition, _ in own}) == 1


def test_a_deploy_finishes_what_runs_and_gives_back_the_rest(broker: BrokerProcess, tmp_path: Path) -> None:
    bodies = {b"%d" % number for number in range(200)}
    publish(broker, "orders", *bodies)
    with Kitchen(tmp_path, "cookbook/operations", broker).running("graceful.py") as consumer:
        shown = logged(consumer, r"(done \d+|closed; .*)")
        first = next(shown)
        consumer.send_signal(signal.SIGTERM)
        *others, last = shown
        assert consumer.wait(LIMIT) == 0
    assert last == "closed; 0 messages are held"
    done = {line.removeprefix("done ").encode() for line in [first, *others]}
    left = broker.messages("orders", "billing")
    assert len(left) == len(set(left))
    assert set(left) == bodies - done


def test_a_deploy_gives_back_what_handlers_do_not_finish_in_time(broker: BrokerProcess, tmp_path: Path) -> None:
    publish(broker, "orders", *(b"%d" % number for number in range(4)))
    kitchen = Kitchen(tmp_path, "cookbook/operations", broker)
    program = tmp_path / "graceful.py"
    endless = 'logging.info("begun"); time.sleep(3600)'  # sleep: a handler that does not end
    hanging = program.read_text().replace("time.sleep(0.1)", endless)
    program.write_text(hanging.replace("timeout=20", "timeout=0.5"))
    with kitchen.running("graceful.py") as consumer:
        assert len(list(islice(logged(consumer, "(begun)"), 4))) == 4
        consumer.send_signal(signal.SIGTERM)
        consumer.communicate()
    with NsqdHTTPClient.from_url(str(broker.nsqd.http_address)) as client:
        (channel,) = client.stats("orders")["topics"][0]["channels"]
    assert (channel["in_flight_count"], channel["depth"]) == (0, 4)  # long before its msg_timeout is over


def test_the_worker_answers_the_probes(broker: BrokerProcess, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    kitchen = Kitchen(tmp_path, "cookbook/operations", broker)
    container = yaml.safe_load((tmp_path / "deployment.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]
    publish(broker, "orders", b"a book")
    command = ["127.0.0.1:0" if each == ":9151" else each for each in container["command"][1:]]
    (variable,) = container["env"]
    with kitchen.running("-m", "nsq_fast", *command, **{variable["name"]: str(broker.lookupd.http)}) as worker:
        address = next(logged(worker, r"http://(127\.0\.0\.1:\d+)"))
        assert lines(worker, 1) == ["billed a book"]
        for probe in ("livenessProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            until(lambda path=path: _status(f"http://{address}{path}") == 200, LIMIT)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LIMIT) == 0


def _status(url: str) -> int:
    try:
        with urlopen(url, timeout=LIMIT) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_renewed_certificate_is_used_without_a_restart(
    authority: trustme.CA, tls_files: dict[str, str], tmp_path: Path
) -> None:
    def certify(ca: trustme.CA) -> None:
        ca.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "new.pem"))
        (tmp_path / "new.pem").rename(tmp_path / "client.pem")

    options = {
        "tls_cert": tls_files["cert"],
        "tls_key": tls_files["key"],
        "tls_root_ca_file": tls_files["ca"],
        "tls_client_auth_policy": "require-verify",
        "tls_required": "tcp-https",
    }
    with BrokerProcess(**options) as broker:
        kitchen = Kitchen(tmp_path, "cookbook/operations", broker)
        shutil.copy(tls_files["ca"], tmp_path / "ca.pem")
        certify(trustme.CA())  # nobody's
        with kitchen.running("tls.py") as consumer:
            next(logged(consumer, r"(unknown ca)"))
            (tmp_path / "client.pem").write_text("half of a certificate")
            next(logged(consumer, r"(client\.pem)"))
            certify(authority)
            secure = {"cafile": tls_files["ca"], "certfile": str(tmp_path / "client.pem")}
            with Producer(str(broker.nsqds[0].tcp), tls_v1=True, tls_options=secure) as producer:
                producer.publish("orders", b"a book")
            assert lines(consumer, 1) == ["a book"]
            consumer.send_signal(signal.SIGTERM)
            assert consumer.wait(LIMIT) == 0


def test_the_test_passes_and_the_progress_is_told(broker: BrokerProcess, tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path, "cookbook/operations", broker)
    kitchen.output("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py")
    assert kitchen.output("watch.py") != ""


@pytest.mark.parametrize("program", ["from_gnsq.py", "from_pynsq.py", "from_ansq.py", "from_asyncnsq.py"])
def test_programs_of_other_clients_moved(program: str, broker: BrokerProcess, tmp_path: Path) -> None:
    assert Kitchen(tmp_path, "cookbook/moving", broker).output(program) == "billed a book\n"


def test_the_tutorial(broker: BrokerProcess, tmp_path: Path) -> None:
    """Its steps in their order; the second shop.py replaces the first."""
    kitchen = Kitchen(tmp_path, "tutorial", broker)
    lookupd = str(broker.lookupd.http)
    assert kitchen.output("publish.py") == "published 100 orders\n"
    stat = ("-m", "nsq_fast", "stat", "--nsqd", str(broker.nsqds[0].http), "--once", "--json")
    assert json.loads(kitchen.output(*stat))[0]["depth"] == 100
    run = ("-m", "nsq_fast", "run", "shop", "--lookupd", lookupd, "--processes", "2", "--http", "127.0.0.1:0")
    with kitchen.running(*run) as worker:
        shown = logged(worker, r"(http://127\.0\.0\.1:\d+|billed order \d+)")
        address = next(shown)
        assert {next(shown) for _ in range(100)} == {f"billed order {number}" for number in range(1, 101)}
        publish(broker, "orders", b'{"number": 101}')
        tail = ("-m", "nsq_fast", "tail", "orders_dead", "--lookupd", lookupd, "--take-backlog", "-n", "1")
        until(lambda: broker.messages("orders_dead") == [b'{"number": 101}'], LIMIT)
        assert kitchen.output(*tail) == '{"number": 101}\n'
        for path in ("/", "/healthz", "/metrics"):
            assert _status(f"{address}{path}") == 200
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LIMIT) == 0
