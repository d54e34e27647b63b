"""One package under two names: whatever is imported as gnsq is what nsq_fast.gnsq has, and the same class."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PROCESS

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


def run(*arguments: str, cwd: Path = ROOT, path: tuple[Path, ...] = ()) -> str:
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
print(gnsq.__version__, gnsq.contrib.batch.BatchHandler.__module__)
"""
    assert run("-c", code) == "1.0.2 nsq_fast.gnsq.contrib"


def test_a_module_may_be_the_first_thing_that_is_imported():
    assert run("-c", "from nsq_fast.gnsq.contrib.queue import QueueHandler; print(QueueHandler.__name__)")
    assert run("-c", "import nsq_fast.gnsq.stream.stream as s; print(s.SSLSocket.__name__)") == "SSLSocket"
    assert run("-c", "import nsq_fast; print(nsq_fast.states.BACKOFF, nsq_fast.backofftimer.BackoffTimer().c)") == "4 0"


def test_an_error_is_caught_by_either_name():
    code = """
import nsq_fast
nsq_fast.install_as_gnsq()
from gnsq.errors import NSQException, NSQInvalid, NSQNoConnections, NSQSocketError
from nsq_fast import errors
assert NSQException is errors.NsqError and NSQInvalid is errors.Invalid
assert NSQNoConnections is errors.NoNsqd and NSQSocketError is errors.ConnectionLost
import gnsq
try:
    gnsq.Producer("127.0.0.1:1").publish("topic", b"x")
except NSQException as error:
    print(type(error).__name__)
"""
    assert run("-c", code) == "NotRunning"


def test_another_gnsq_that_was_imported_before_is_not_half_replaced(tmp_path):
    (tmp_path / "gnsq.py").write_text("")
    code = """
import gnsq, nsq_fast
try:
    nsq_fast.install_as_gnsq()
except ValueError as error:
    print(error)
"""
    assert "imported already" in run("-c", code, cwd=tmp_path)


def test_installing_twice_changes_nothing():
    code = "import nsq_fast; nsq_fast.install_as_gnsq(); import gnsq; nsq_fast.install_as_gnsq(); import gnsq as again"
    assert run("-c", f"{code}; print(gnsq is again)") == "True"


def test_the_package_itself_serves_as_gnsq_for_who_only_uses_attributes():
    code = """
import nsq_fast as gnsq
for name in ("Consumer", "Reader", "Producer", "Nsqd", "NsqdTCPClient", "NsqdHTTPClient", "Lookupd", "LookupdClient",
             "Message", "BackoffTimer"):
    getattr(gnsq, name)
print(gnsq.errors.NSQRequeueMessage(False).backoff, gnsq.states.BACKOFF, gnsq.errors.NSQInvalid.__name__)
"""
    assert run("-c", code) == "False 4 Invalid"


PROGRAM = """
import sys
import gnsq
from gnsq.contrib.queue import QueueHandler
print(gnsq.__name__, QueueHandler.__module__, __name__, *sys.argv[1:])
"""


def test_run_as_gnsq_runs_a_program_and_a_module_with_their_arguments(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    expected = "nsq_fast.gnsq nsq_fast.gnsq.contrib __main__ -x --help y"
    command = ("-m", "nsq_fast", "run-as-gnsq")
    assert run(*command, str(tmp_path / "program.py"), "-x", "--help", "y") == expected
    assert run(*command, "-m", "program", "-x", "--help", "y", cwd=tmp_path) == expected


def test_run_as_gnsq_shows_the_programs_own_failure(tmp_path):
    (tmp_path / "program.py").write_text("import gnsq\nraise gnsq.errors.NSQNoConnections('of the program')\n")
    done = subprocess.run(
        [sys.executable, "-m", "nsq_fast", "run-as-gnsq", str(tmp_path / "program.py")],
        capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1
    assert "program.py" in done.stderr
    assert done.stderr.rstrip().endswith("of the program")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_shim_distribution_makes_gnsq_importable(tmp_path):
    source = tmp_path / "shim"
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    run("-c", f"import shutil; shutil.copytree({str(ROOT / 'shim')!r}, {str(source)!r})")
    built = tmp_path / "built"
    subprocess.run([sys.executable, "-c", code, str(built)], cwd=source, check=True, capture_output=True, timeout=250)
    (wheel,) = built.glob("gnsq-1.0.2*.whl")
    code = (
        "from gnsq.errors import NSQInvalid; import gnsq, gnsq.contrib.batch; print(gnsq.__name__, NSQInvalid.__name__)"
    )
    assert run("-c", code, path=(wheel,)) == "nsq_fast.gnsq Invalid"


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
    assert run("-m", "nsq_fast", "run-as-gnsq", str(tmp_path / "program.py")) == "hello"
