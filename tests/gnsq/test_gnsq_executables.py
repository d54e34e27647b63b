"""The embedded servers as executables called nsqd and nsqlookupd, for what starts the originals and reads their log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import SERVERS, find_server
from support.waiting import until

from nsq_fast import Producer, gnsq
from nsq_fast.broker.executable import main, parse_flags, version_line
from nsq_fast.errors import ConfigError

ROOT = Path(__file__).parents[2]
LISTENING = re.compile(r"(TCP|HTTP|HTTPS): listening on (\S+):(\d+)$")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for PATH, with both executables."""
    for kind in ("nsqd", "nsqlookupd"):
        program = tmp_path / "bin" / kind
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsq_fast {kind} "$@"\n')
        program.chmod(0o755)
    return tmp_path / "bin"


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Iterator[object]:
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
def test_the_version_line_is_that_of_the_original(folder, kind):
    line = subprocess.check_output([folder / kind, "--version"], text=True, cwd=ROOT)
    assert re.fullmatch(rf"{kind} v\d+\.\d+\.\d+ \(built w/nsq-fast-[a-z0-9.-]+\)\n", line)


def test_an_nsqd_registers_and_serves(run, tmp_path):
    free = ("-tcp-address=127.0.0.1:0", "--http-address", "127.0.0.1:0", "-broadcast-address=127.0.0.1")
    lookupd = run("nsqlookupd", *free)
    (tmp_path / "data").mkdir()
    nsqd = run(
        "nsqd", *free, "--lookupd-tcp-address", "{}:{}".format(*lookupd["TCP"]), "-data-path", str(tmp_path / "data"),
        "-max-rdy-count=7", "-msg-timeout=1m30s", "-snappy=false", "-verbose", "-log-prefix=x",
    )  # fmt: skip
    with Producer([nsqd["TCP"]]) as producer:
        assert producer.publish("topic", b"x") == b"OK"
    client = gnsq.NsqdTCPClient(*nsqd["TCP"], snappy=True)
    client.connect()
    reply = client.identify()
    assert reply is not None
    assert (reply["max_rdy_count"], reply["msg_timeout"], reply["snappy"]) == (7, 90_000, False)
    nodes = gnsq.LookupdClient(*lookupd["HTTP"])
    until(lambda: "topic" in nodes.topics()["topics"])
    assert nodes.lookup("topic")["producers"][0]["tcp_port"] == nsqd["TCP"][1]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("-no-such-flag",), "flag provided but not defined: -no-such-flag"),
        (("-msg-timeout=soon",), "not a duration"),
        (("-tcp-address",), "needs an argument"),
        (("argument",), "unexpected argument"),
        (
            ("-log-level=loud",),
            'invalid value "loud" for flag -log-level: must be one of debug, info, warn, error, fatal',
        ),
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
msg_timeout = "1m30s"
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


def test_a_configuration_file_is_read_as_the_original_reads_it(run_any, tmp_path):
    lookupd_config = tmp_path / "lookupd.cfg"
    lookupd_config.write_text('tcp_address = "127.0.0.1:0"\nhttp_address = "127.0.0.1:0"\nbroadcast_address = "lo"\n')
    lookupd = run_any("nsqlookupd", f"-config={lookupd_config}")
    config = tmp_path / "nsqd.cfg"
    config.write_text(CONFIG.format(level="info", lookupd="{}:{}".format(*lookupd["TCP"])))
    nsqd = run_any("nsqd", "--config", str(config), "-max-msg-size=3000", f"-data-path={tmp_path}")
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


@pytest.mark.parametrize("kind", ["nsqd", "nsqlookupd"])
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "failed to load config file .*nsq.cfg - .*No such file"),
        ("tcp_address = ", "failed to load config file .*nsq.cfg - "),
        ('log_level = "loud"', 'invalid value "loud" for log_level in .*nsq.cfg: must be one of debug'),
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


def test_a_version_between_two_releases_is_one_that_gnsqs_tests_can_read(monkeypatch):
    """Their pattern: it allows no plus sign, which the version of what is built between two tags has."""
    monkeypatch.setattr("nsq_fast.broker.executable.__version__", "1.0.0.dev7+gABC1234.dirty")
    line = version_line("nsqd")
    assert re.fullmatch(r"nsqd v\d+\.\d+\.\d+ \(built w/nsq-fast-1\.0\.0\.dev7-gabc1234\.dirty\)", line)
    assert re.search(r"\(built w\/(?P<go_version>[a-z0-9.-]+)\)", line)
