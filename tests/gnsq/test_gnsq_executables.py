"""The embedded servers as executables called nsqd and nsqlookupd, for what starts the originals and reads their log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until

from nsq_fast import Producer, gnsq
from nsq_fast.broker.servers.executable import parse_flags
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
    assert re.fullmatch(rf"{kind} v\d+\.\d+\.\d+ \(built w/nsq-fast-[a-z0-9.+]+\)\n", line)


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
    ],
)
def test_wrong_flags_are_refused_as_the_original_does(flags, error):
    with pytest.raises(ConfigError, match=error):
        parse_flags("nsqd", flags)


def test_flags_that_may_come_again_are_gathered_and_https_needs_a_certificate():
    flags = parse_flags("nsqd", ["-lookupd-tcp-address=a:1", "--lookupd-tcp-address=b:2", "-https-address=c:3"])
    assert flags["lookupd_tcp_addresses"] == ("a:1", "b:2")
    assert "https_address" not in flags
