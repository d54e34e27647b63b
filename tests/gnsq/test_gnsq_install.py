"""One package under two names, the embedded servers as nsqd and nsqlookupd, and with both gnsq's own tests."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import SERVERS, find_server
from support.waiting import PROCESS, until

from nsq_fast import gnsq
from nsq_fast.broker.executable import main, parse_flags
from nsq_fast.errors import ConfigError

ROOT = Path(__file__).parents[2]
SUBMODULES = {
    "backofftimer": "BackoffTimer",
    "consumer": "Consumer",
    "contrib.batch": "BatchHandler",
    "contrib.giveup": "LogGiveupHandler JSONLogGiveupHandler NsqdGiveupHandler",
    "contrib.queue": "QueueHandler ChannelHandler",
    "contrib.sentry": "SentryExceptionHandler",
    "decorators": "cached_property deprecated",
    "errors": "NSQException NSQRequeueMessage ERROR_CODES make_error",
    "httpclient": "HTTPClient USERAGENT",
    "lookupd": "LookupdClient Lookupd",
    "message": "Message",
    "nsqd": "NsqdTCPClient NsqdHTTPClient Nsqd HOSTNAME SHORTNAME",
    "producer": "Producer",
    "protocol": "unpack_message multipublish VALID_NAME_RE",
    "reader": "Reader",
    "states": "INIT CONNECTED DISCONNECTED RUNNING BACKOFF THROTTLED CLOSED",
    "stream": "Stream",
    "stream.compression": "CompressionSocket",
    "stream.defalte": "DefalteSocket",
    "stream.snappy": "SnappySocket",
    "stream.stream": "Stream SSLSocket SnappySocket DefalteSocket",
    "util": "normalize_nsqd_address parse_nsqds parse_lookupds",
    "version": "__version__",
}
"""gnsq's modules, and the names that programs take from them."""


def python(*arguments: str, cwd: Path = ROOT, path: tuple[Path, ...] = ()) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, (*path, ROOT))), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS,
        check=False,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_has_both_names():
    code = f"""
import importlib, sys
from nsq_fast import install_as_gnsq
install_as_gnsq()
for name, members in {SUBMODULES!r}.items():
    module = importlib.import_module("gnsq." + name)
    assert module is importlib.import_module("nsq_fast.gnsq." + name), name
    for member in members.split():
        getattr(module, member)
import gnsq, gnsq.contrib.batch as batch
import nsq_fast.gnsq
from gnsq.contrib import queue
assert gnsq is nsq_fast.gnsq and batch is gnsq.contrib.batch and queue.QueueHandler is batch.QueueHandler
install_as_gnsq()
import gnsq as again
assert again is gnsq, "installing twice changes nothing"
from gnsq.errors import NSQException, NSQInvalid, NSQNoConnections, NSQSocketError
from nsq_fast import errors
assert NSQException is errors.NsqError and NSQInvalid is errors.Invalid
assert NSQNoConnections is errors.NoNsqd and NSQSocketError is errors.ConnectionLost
try:
    gnsq.Producer("127.0.0.1:1").publish("topic", b"x")
except NSQException as error:
    print(gnsq.__version__, batch.BatchHandler.__module__, type(error).__name__)
"""
    assert python("-c", code) == "1.0.2 nsq_fast.gnsq.contrib NotRunning"


@pytest.mark.parametrize(
    "statement",
    ["from nsq_fast.gnsq.contrib.queue import QueueHandler", "import nsq_fast.gnsq.stream.stream as s; s.SSLSocket"],
)
def test_a_module_may_be_the_first_thing_that_is_imported(statement):
    python("-c", statement)


def test_another_gnsq_that_was_imported_before_is_not_half_replaced(tmp_path):
    (tmp_path / "gnsq.py").write_text("")
    code = """
import gnsq, nsq_fast
try:
    nsq_fast.install_as_gnsq()
except ValueError as error:
    print(error)
"""
    assert "imported already" in python("-c", code, cwd=tmp_path)


def test_the_package_itself_serves_as_gnsq_for_who_only_uses_attributes():
    code = """
import nsq_fast as gnsq
for name in ("Consumer", "Reader", "Producer", "Nsqd", "NsqdTCPClient", "NsqdHTTPClient", "Lookupd", "LookupdClient",
             "Message", "BackoffTimer"):
    getattr(gnsq, name)
print(gnsq.errors.NSQRequeueMessage(False).backoff, gnsq.states.BACKOFF, gnsq.backofftimer.BackoffTimer().c)
"""
    assert python("-c", code) == "False 4 0"


PROGRAM = """
import sys
import gnsq
from gnsq.contrib.queue import QueueHandler
print(gnsq.__name__, QueueHandler.__module__, __name__, *sys.argv[1:])
if "fail" in sys.argv:
    raise gnsq.errors.NSQNoConnections("of the program")
"""


def test_run_as_gnsq_runs_a_program_and_a_module_with_their_arguments_and_shows_their_failure(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    expected = "nsq_fast.gnsq nsq_fast.gnsq.contrib __main__ -x --help"
    command = ("-m", "nsq_fast", "run-as-gnsq")
    assert python(*command, "-m", "program", "-x", "--help", cwd=tmp_path) == expected
    failing = [sys.executable, *command, tmp_path / "program.py", "-x", "--help", "fail"]
    done = subprocess.run(failing, capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, f"{expected} fail\n")
    assert "program.py" in done.stderr
    assert done.stderr.rstrip().endswith("of the program")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_shim_distribution_makes_gnsq_importable(tmp_path):
    source = tmp_path / "shim"
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    python("-c", f"import shutil; shutil.copytree({str(ROOT / 'shim')!r}, {str(source)!r})")
    built = tmp_path / "built"
    subprocess.run([sys.executable, "-c", code, str(built)], cwd=source, check=True, capture_output=True, timeout=250)
    (wheel,) = built.glob("gnsq-1.0.2*.whl")
    code = (
        "from gnsq.errors import NSQInvalid; import gnsq, gnsq.contrib.batch; print(gnsq.__name__, NSQInvalid.__name__)"
    )
    assert python("-c", code, path=(wheel,)) == "nsq_fast.gnsq Invalid"


PATCHED = """
import warnings
warnings.simplefilter("error")
from gevent import monkey
monkey.patch_all()
import gnsq
from nsq_fast.broker import Broker

with Broker() as broker:
    producer = gnsq.Producer(str(broker.nsqd.tcp_address))
    producer.start()
    producer.publish("topic", b"hello")
    producer.close()
    consumer = gnsq.Consumer("topic", "channel", lookupd_http_addresses=str(broker.lookupd.http_address))

    @consumer.on_message.connect
    def handle(consumer, message):
        print(message.body.decode())
        consumer.close()

    consumer.start()
"""


def test_a_program_that_monkey_patches_first_runs_unchanged(tmp_path):
    (tmp_path / "program.py").write_text(PATCHED)
    assert python("-m", "nsq_fast", "run-as-gnsq", str(tmp_path / "program.py")) == "hello"


# The embedded servers as executables called nsqd and nsqlookupd, for what starts the originals and reads their log.


LISTENING = re.compile(r"(TCP|HTTP|HTTPS): listening on (\S+):(\d+)$")


def our_servers(folder: Path) -> Path:
    """Write both executables, for PATH."""
    folder.mkdir(exist_ok=True)
    for kind in ("nsqd", "nsqlookupd"):
        program = folder / kind
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsq_fast {kind} "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[object]:
    folder = our_servers(tmp_path / "bin")
    processes = []

    def start(kind: str, *flags: str) -> dict[str, tuple[str, int]]:
        """Start one; return where it listens, by face, once TCP and HTTP do."""
        process = subprocess.Popen(
            [folder / kind, *flags], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        processes.append(process)
        assert process.stderr is not None
        faces: dict[str, tuple[str, int]] = {}
        for line in process.stderr:
            if match := LISTENING.search(line):
                faces[match[1]] = (match[2], int(match[3]))
            if len(faces) == 2:
                return faces
        raise AssertionError(f"{kind} ended: {process.wait()}")

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.parametrize("kind", ["nsqd", "nsqlookupd"])
def test_the_version_line_is_that_of_the_original(kind, monkeypatch, capsys):
    """gnsq's tests read it by a pattern that allows no plus sign, which the version between two tags has."""
    for version, shown in (("1.0.0", "1.0.0"), ("1.0.0.dev7+gABC1234.dirty", "1.0.0.dev7-gabc1234.dirty")):
        monkeypatch.setattr("nsq_fast.broker.executable.__version__", version)
        assert main(kind, ["--version"]) == 0
        pattern = rf"{kind} v\d+\.\d+\.\d+ \(built w/nsq-fast-{re.escape(shown)}\)\n"
        assert re.fullmatch(pattern, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("-no-such-flag",), "flag provided but not defined: -no-such-flag"),
        (("-msg-timeout=soon",), "not a duration"),
        (("-tcp-address",), "needs an argument"),
        (("argument",), "unexpected argument"),
        (("-log-level=loud",), 'invalid value "loud" for flag -log-level: must be one of debug, info, warn, error'),
        (("-version=x",), "flag provided but not defined"),
    ],
)
def test_wrong_flags_are_refused_as_the_original_does(flags, error):
    with pytest.raises(ConfigError, match=error):
        parse_flags("nsqd", flags)


def test_flags_that_may_come_again_are_gathered_and_https_needs_a_certificate():
    flags = parse_flags("nsqd", ["-lookupd-tcp-address=a:1", "--lookupd-tcp-address=b:2", "-https-address=c:3"])
    assert flags["lookupd_tcp_addresses"] == ("a:1", "b:2")
    assert "https_address" not in flags


CONFIG = """
log_level = "{level}"
id = 77
tcp_address = "127.0.0.1:0"
http_address = "127.0.0.1:0"
broadcast_address = "127.0.0.1"
nsqlookupd_tcp_addresses = ["{lookupd}"]
msg_timeout = "1s"
max_msg_timeout = 100000
max_rdy_count = 7
max_msg_size = 2000
snappy = false
tls_required = false
no_such_option = 1
e2e_processing_latency_percentiles = [1.0, 0.95]
"""


@pytest.fixture(params=["embedded", "original"])
def run_any(request, run, tmp_path):
    """Start an nsqd, or its original, with flags; HTTP and TCP addresses."""
    if request.param == "embedded":
        return run
    binary = find_server("nsqd")
    if binary is None:
        pytest.skip(f"no real nsqd below {SERVERS}")
    for kind in ("nsqd", "nsqlookupd"):
        (tmp_path / "bin" / kind).write_text(f'#!/bin/sh\nexec "{binary.parent / kind}" "$@"\n')
    return run


def test_flags_and_a_configuration_file_are_read_as_the_original_reads_them(run_any, tmp_path):
    lookupd_config = tmp_path / "lookupd.cfg"
    lookupd_config.write_text('tcp_address = "127.0.0.1:1"\nhttp_address = "127.0.0.1:0"\nbroadcast_address = "lo"\n')
    lookupd = run_any("nsqlookupd", f"-config={lookupd_config}", "-tcp-address=127.0.0.1:0")
    config = tmp_path / "nsqd.cfg"
    config.write_text(CONFIG.format(level="info", lookupd="{}:{}".format(*lookupd["TCP"])))
    flags = ("-max-msg-size=3000", "-data-path", str(tmp_path), "-msg-timeout=1m30s", "-verbose", "-log-prefix=x")
    nsqd = run_any("nsqd", "--config", str(config), *flags)
    client = gnsq.NsqdTCPClient(*nsqd["TCP"], snappy=True)
    client.connect()
    reply = client.identify()
    assert reply is not None
    assert (reply["max_rdy_count"], reply["msg_timeout"], reply["max_msg_timeout"]) == (7, 90_000, 100_000)
    assert reply["snappy"] is False
    http = gnsq.NsqdHTTPClient(*nsqd["HTTP"])
    assert http.publish("topic", b"x" * 3000) == b"OK"  # a flag comes before the file
    nodes = gnsq.LookupdClient(*lookupd["HTTP"])
    until(lambda: "topic" in nodes.topics()["topics"])
    assert nodes.lookup("topic")["producers"][0]["tcp_port"] == nsqd["TCP"][1]


@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        ("nsqd", None, "failed to load config file .*nsq.cfg - .*No such file"),
        ("nsqlookupd", "tcp_address = ", "failed to load config file .*nsq.cfg - "),
        ("nsqd", 'log_level = "loud"', 'invalid value "loud" for log_level in .*nsq.cfg: must be one of debug'),
    ],
)
def test_a_configuration_file_that_cannot_be_read_is_an_error(kind, content, error, tmp_path, capfd):
    path = tmp_path / "nsq.cfg"
    if content is not None:
        path.write_text(content)
    assert main(kind, ["-config", str(path)]) == 2
    assert re.search(error, capfd.readouterr().err)


def test_what_has_no_effect_is_said(tmp_path):
    path = tmp_path / "nsq.cfg"
    path.write_text("no_such_option = 1\nnode_id = 5\n")
    flags = parse_flags("nsqd", [f"-config={path}", "-enable-experiment=topology-aware-consumption", "-worker-id"])
    assert [note.partition(" has no effect")[0] for note in flags["notes"]] == [
        "-enable-experiment=topology-aware-consumption",
        f"{path}: no_such_option",
        f"{path}: node_id",
    ]


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("id = 5", "node_id", "5"),
        ('sync_timeout = "3s"', "sync_timeout", 3.0),
        ("sync_timeout = 3", "sync_timeout", 0.003),
        ('auth_http_addresses = "a:1,b:2"', "auth_http_addresses", ("a:1", "b:2")),
        ('e2e_processing_latency_percentiles = "1.0,0.5"', "e2e_processing_latency_percentiles", (1.0, 0.5)),
        ("tls_required = true", "tls_required", "true"),
        ('log_level = "WARN"', "log_level", "WARNING"),
    ],
)
def test_lines_of_a_configuration_file(tmp_path, line, option, value):
    path = tmp_path / "nsq.cfg"
    path.write_text(line)
    assert parse_flags("nsqd", [f"-config={path}"])[option] == value


# gnsq's own tests, unmodified: they need a checkout of its repository, named by NSQ_FAST_GNSQ, and six


CHECKOUT = Path(os.environ.get("NSQ_FAST_GNSQ", "nowhere"))


def real_servers(folder: Path) -> Path:
    found = find_server("nsqd")
    if found is None:
        pytest.skip("no real nsqd")
    return found.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (CHECKOUT / "tests").exists(), reason="NSQ_FAST_GNSQ names no checkout of gnsq")
@pytest.mark.skipif(importlib.util.find_spec("six") is None, reason="gnsq's tests need six")
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
