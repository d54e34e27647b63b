"""The examples: embedding in other libraries, a worker in production, web frameworks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml
from support.processes import piped
from support.recipes import files_of
from support.waiting import PROCESS, until

from nsq_fast import NsqdHTTPClient
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.threads import Consumer, Producer
from nsq_fast.worker.settings import Settings, SettingsReader, Subscription, WorkerConfig

# The programs of examples/embedding, each in a process of its own, against a broker in another.
#
# Where a program does without gevent, gevent cannot be imported in its process.


ROOT = Path(__file__).parents[2]

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
    with piped() as begin:
        yield lambda script, *arguments: begin(sys.executable, "-c", NO_GEVENT, EXAMPLES / script, *arguments)


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
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CFLAGS": "-O0"}  # what it does, and not how fast
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python("setup.py", "build_ext", "--inplace")
    assert python("count.py", str(recording)).split() == ["9", "4", "36", "1000", "1"]


# The deployment files of examples/production, each checked by the tool that reads it.


FOLDER = ROOT / "examples" / "production"
UNIT = "nsq-fast-worker.service"

MARGIN = 10

"""Seconds beyond drain_timeout that docs/production.md tells to wait before a worker is killed."""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def settings_of(path: Path) -> Settings:
    return SettingsReader().read(str(path), {}, ())


@pytest.fixture
def deployment() -> Any:
    (found,) = (each for each in documents("kubernetes.yaml") if each["kind"] == "Deployment")
    return found


@pytest.mark.slow
def test_the_program_and_its_file_pass_the_check() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NSQ_FAST_CONFIG": str(FOLDER / "worker.toml")}
    command = [sys.executable, "-m", "nsq_fast", "run", "app", "--check"]
    checked = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=PROCESS, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "orders/billing: asyncio\n"), checked.stderr


def test_kubernetes_takes_the_manifests() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for each in documents("kubernetes.yaml"):
        validator.validate(each, "1.30", strict=True)


def test_the_pod_asks_what_the_worker_answers(deployment: Any, tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(documents("kubernetes.yaml")[0]["data"]["worker.toml"])
    worker = settings_of(tmp_path / "worker.toml").worker
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert worker.http == f":{container['ports'][0]['containerPort']}"
    probes = [container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")]
    assert probes == ["/healthz", "/readyz"]
    assert pod["terminationGracePeriodSeconds"] >= worker.drain_timeout + MARGIN
    names = {each["name"].removeprefix("NSQ_FAST_").lower() for each in container["env"]}
    assert names <= WorkerConfig.names() | {"config"}


def test_keda_scales_the_deployment_by_its_channel(deployment: Any) -> None:
    (scaled,) = documents("keda.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    # keda.sh/docs/2.19/scalers/nsq: all values are strings
    known = {"nsqLookupdHTTPAddresses", "topic", "channel", "depthThreshold", "activationDepthThreshold"}
    assert trigger["type"] == "nsq"
    assert set(trigger["metadata"]) == known
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert '@subscribe("{topic}", "{channel}"'.format(**trigger["metadata"]) in (FOLDER / "app.py").read_text()


def test_docker_compose_takes_its_file() -> None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            checked = [*command, "-f", str(FOLDER / "compose.yaml"), "config", "--quiet"]
            subprocess.run(checked, timeout=PROCESS, check=True)
            return
    pytest.skip("neither docker compose nor docker-compose is installed")


def test_containers_and_the_unit_have_time_to_drain_and_the_image_has_what_it_copies_and_opens_the_port() -> None:
    settings = settings_of(FOLDER / "worker.toml")
    assert settings.options_of(Subscription("orders", "billing", print))["concurrency"] == 16, "its special part"
    compose, unit, image = ((FOLDER / name).read_text() for name in ("compose.yaml", UNIT, "Dockerfile"))
    for pattern, text in ((r"stop_grace_period: (\d+)s\b", compose), (r"^TimeoutStopSec=(\d+)$", unit)):
        (seconds,) = re.findall(pattern, text, re.M)
        assert int(seconds) >= settings.worker.drain_timeout + MARGIN
    (copied,) = re.findall(r"^COPY (.*) \./$", image, re.M)
    assert [name for name in copied.split() if not (FOLDER / name).is_file()] == []
    port = (settings.worker.http or "").removeprefix(":")
    assert f"EXPOSE {port}\n" in image
    assert f":{port}/healthz" in image


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (FOLDER / UNIT).read_text()
    assert "ExecStart=/opt/worker/venv/bin/nsq-fast run app " in unit
    path = tmp_path / UNIT
    path.write_text(unit.replace("/opt/worker/venv/bin/nsq-fast", sys.executable))  # it wants a program that is there
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False)
    assert checked.returncode == 0, checked.stderr
    assert path.name not in checked.stderr


# The recipes for web frameworks (docs/cookbook/web.md), each run by the real library.


PROGRAMS = files_of("cookbook/web")

WAIT = 30.0

SOON = 15.0

"""Seconds that mean: gunicorn has not killed its workers, which it does after 30."""


@contextmanager
def running(*command: str, nsqd: str, cwd: Path, inherited: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "NSQD": nsqd, "PYTHONPATH": f"{ROOT}:{cwd}"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=cwd, env=environment, pass_fds=inherited,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send SIGTERM; return what it has written when it has ended well."""
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    return output, errors


def asked(url: str, body: bytes | None = None) -> int:
    try:
        with urlopen(Request(url, data=body), timeout=WAIT) as answer:
            return int(answer.status)
    except URLError as error:
        return getattr(error, "code", 0)


def output_of_fastapi(program: str, nsqd: str, folder: Path) -> str:
    """What a program prints that asks the example for FastAPI."""
    pytest.importorskip("fastapi.testclient")
    (folder / "fastapi_app.py").write_text(PROGRAMS["fastapi_app.py"])
    with running("-c", program, nsqd=nsqd, cwd=folder) as process:
        output, errors = process.communicate(timeout=2 * WAIT)
    assert process.returncode == 0, errors
    return output


@pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True)
def test_fastapi_publishes_consumes_and_says_how_it_is(nsqd_process: Any, tmp_path: Path) -> None:
    program = f"""
import sys, time
from fastapi.testclient import TestClient
import fastapi_app
with TestClient(fastapi_app.app) as client:
    for number in range(20):
        answer = client.post("/orders", content=b"%d" % number)
        assert answer.status_code == 202, answer.text
    assert client.post("/orders", content=b"").status_code == 400
    end = time.monotonic() + {WAIT}
    while client.get("/health").json()["handled"] < 20:
        assert time.monotonic() < end
        time.sleep(0.01)  # sleep: looks again and again
print(sorted(map(int, fastapi_app.handled)) == list(range(20)))
"""
    assert output_of_fastapi(program, nsqd_process.address, tmp_path) == "True\n"


def test_fastapi_says_503_while_nsqd_is_down(closed_port: int, tmp_path: Path) -> None:
    program = """
from fastapi.testclient import TestClient
import fastapi_app
with TestClient(fastapi_app.app) as client:
    answers = [client.post("/orders", content=b"1"), client.get("/health")]
print(*(answer.status_code for answer in answers))
"""
    assert output_of_fastapi(program, f"127.0.0.1:{closed_port}", tmp_path) == "503 503\n"


IN_THREADS = ("flask_app:app", "-k", "gthread", "--threads", "4")
ON_GEVENT = ("gevent_app:app", "-k", "gevent", "--config", "gunicorn_conf.py")


@contextmanager
def gunicorn(
    folder: Path, nsqd: str, *arguments: str, app: tuple[str, ...] = IN_THREADS
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Gunicorn with an example for Flask, as it is or as the folder has it, and its URL."""
    pytest.importorskip("flask")
    pytest.importorskip("gunicorn")
    for name in {"flask_app.py", "gevent_app.py", "gunicorn_conf.py"} - {path.name for path in folder.iterdir()}:
        (folder / name).write_text(PROGRAMS[name])
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:  # the server inherits it
        command = ("-m", "gunicorn", *app, "-b", f"fd://{sock.fileno()}", *arguments)
        with running(*command, nsqd=nsqd, cwd=folder, inherited=(sock.fileno(),)) as process:
            yield process, f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_flask_says_503_while_nsqd_is_down(closed_port: int, tmp_path: Path) -> None:
    with gunicorn(tmp_path, f"127.0.0.1:{closed_port}") as (process, url):
        assert asked(f"{url}/orders", b"1") == 503
        assert asked(f"{url}/health") == 503
        ended(process)


def on_a_server_each(*preloaded: str) -> Any:
    """With --preload the application, and with it the producer, is made before the workers are forked."""
    values = [((), "original"), (("--preload", *preloaded), "embedded")]
    names = ("arguments", "nsqd_process")
    return pytest.mark.parametrize(names, values, indirect=["nsqd_process"], ids=["plain", "preloaded"])


@on_a_server_each("--workers", "2")
def test_flask_publishes_from_the_threads_of_gunicorn(
    nsqd_process: Any, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    with gunicorn(tmp_path, nsqd_process.address, *arguments) as (process, url):
        assert [asked(f"{url}/orders", b"%d" % number) for number in range(20)] == 20 * [202]
        assert asked(f"{url}/orders", b"") == 400
        until(lambda: asked(f"{url}/health") == 200)  # each worker connects when it is asked
        began = time.monotonic()
        ended(process)
        assert time.monotonic() - began < SOON
    found: set[bytes] = set()
    with Consumer("orders", "c", nsqd_process.address, max_in_flight=20) as consumer:
        for message in consumer:
            found.add(message.body)
            if len(found) == 20:
                message.finish()
                break


@on_a_server_each()
def test_flask_consumes_on_gevent_and_a_reload_and_the_end_leave_nothing_in_flight(
    nsqd_process: Any, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    noting = 'import gevent; gevent.sleep(0.05); os.write(1, message.body + b"\\n")'  # sleep: it is at work at the end
    printing = 'print("order", message.body.decode(), flush=True)'
    (tmp_path / "gevent_app.py").write_text(PROGRAMS["gevent_app.py"].replace(printing, noting))
    with gunicorn(tmp_path, nsqd_process.address, *arguments, "--workers", "2", app=ON_GEVENT) as (process, url):
        published = 0
        for number in (signal.SIGHUP, signal.SIGTERM):
            assert asked(f"{url}/orders", b"%d" % published) == 202
            assert asked(f"{url}/orders", b"") == 400
            with Producer(nsqd_process.address) as producer:
                producer.multipublish("orders", [b"%d" % (published + each) for each in range(1, 500)])
            published += 500
            process.send_signal(number)
        output, errors = process.communicate(timeout=2 * WAIT)
        assert process.returncode == 0, errors
    handled = output.splitlines()
    with NsqdHTTPClient(*nsqd_process.http) as client:
        (channel,) = client.stats("orders")["topics"][0]["channels"]
    assert handled
    assert channel["in_flight_count"] == 0
    assert len(handled) == len(set(handled)) == published - channel["depth"]


@pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True)
def test_a_command_of_django_consumes_until_it_gets_a_signal(nsqd_process: Any, tmp_path: Path) -> None:
    pytest.importorskip("django")
    commands = tmp_path / "shop" / "management" / "commands"
    commands.mkdir(parents=True)
    (commands / "consume.py").write_text(PROGRAMS["consume.py"])
    (tmp_path / "manage.py").write_text(
        "import sys\nfrom django.conf import settings\nfrom django.core.management import execute_from_command_line\n"
        "settings.configure(INSTALLED_APPS=['shop'])\nexecute_from_command_line(sys.argv)\n"
    )
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("orders", [b"%d" % number for number in range(20)])
    command = ("-u", "manage.py", "consume", "orders", "--nsqd", nsqd_process.address)
    with running(*command, nsqd=nsqd_process.address, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline() for _ in range(20)}
        ended(process)
    assert lines == {f"{number}\n" for number in range(20)}
