"""Start nsqd and nsqlookupd from a folder of server binaries on free ports; stop them and delete what they stored."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.names import Address

START_TIMEOUT = 10.0
_POLL = 0.01
_LISTENING = re.compile(r"(TCP|HTTP): listening on \S+?:(\d+)$", re.MULTILINE)
_FLAGS = ("-mem-queue-size=10000000", "-max-rdy-count=100000", "-https-address=127.0.0.1:0")


class Started:
    """A running server: process id, ports, and what it calls itself."""

    def __init__(self, pid: int, ports: dict[str, int], version: str) -> None:
        self.pid = pid
        self.version = version
        self.tcp = Address("127.0.0.1", ports["TCP"])
        self.http = Address("127.0.0.1", ports["HTTP"])


@contextmanager
def nsqd(folder: Path, host: str, *flags: str) -> Iterator[Started]:
    """Run ``folder/nsqd`` on free ports of ``host``. Raises ConfigError without a binary, NsqError when it ends."""
    with (
        tempfile.TemporaryDirectory(prefix="nsq-fast-bench-") as data,
        _server(folder / "nsqd", host, Path(data) / "log", f"-data-path={data}", *_FLAGS, *flags) as started,
    ):
        yield started


@contextmanager
def nsqlookupd(folder: Path) -> Iterator[Started]:
    """Run ``folder/nsqlookupd`` on free ports; the same errors."""
    with (
        tempfile.TemporaryDirectory(prefix="nsq-fast-bench-") as data,
        _server(folder / "nsqlookupd", "127.0.0.1", Path(data) / "log") as started,
    ):
        yield started


@contextmanager
def _server(binary: Path, host: str, log: Path, *flags: str) -> Iterator[Started]:
    if not os.access(binary, os.X_OK):
        raise ConfigError(f"{binary} is not there, or not executable")
    command = [str(binary), f"-tcp-address={host}:0", f"-http-address={host}:0", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield Started(process.pid, _wait_for_ports(process, binary.name, log), _version(binary))
    finally:
        process.kill()
        process.wait()


def _wait_for_ports(process: subprocess.Popen[bytes], name: str, log: Path) -> dict[str, int]:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        ports = {face: int(port) for face, port in _LISTENING.findall(log.read_text())}
        if len(ports) == 2:
            return ports
        time.sleep(_POLL)
    raise NsqError(f"{name} did not start:\n{log.read_text()[-2000:]}")


def _version(binary: Path) -> str:
    done = subprocess.run([str(binary), "-version"], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip().split(" (")[0]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 with its key, by the openssl program. Raises NsqError where that fails."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    try:
        done = subprocess.run([*new, "-keyout", key, "-out", cert], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NsqError(f"a certificate is made with the openssl program: {error}") from error
    if done.returncode:
        raise NsqError(f"openssl made no certificate:\n{done.stderr[-1000:]}")
    return cert, key
