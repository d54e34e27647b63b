"""A connection against a real nsqd, with every combination of TLS and compression, patched and unpatched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.blocking import Connection
from support.peers import RecordingOwner
from support.waiting import PROCESS

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import BadTopic, ConnectFailed, FinFailed, SubFailed

BODIES = [bytes([number % 256]) * (number * 37 % 5000) + b"!" for number in range(1000)]


class Consumer(RecordingOwner):
    """Finishes what it gets, half of it one by one, half as a batch."""

    def on_messages(self, conn: Any, messages: list[Message]) -> None:
        super().on_messages(conn, messages)
        half = len(messages) // 2
        for message in messages[:half]:
            message.finish()
        for message in messages[half:]:
            message.mark_responded()
            conn.finish_returned(message)


def publish(address: Any, owner: RecordingOwner, **options: Any) -> None:
    conn = Connection(address, ConnectionConfig(**options), owner)
    conn.connect()
    conn.request(_codec.mpub("t", BODIES[:500]), "MPUB", 0)
    for body in BODIES[500:]:
        conn.request(_codec.pub("t", body), "PUB", body)
    conn.close()
    assert len(owner.replies) == 501


@pytest.mark.parametrize("compression", [None, "snappy", "deflate"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_publish_and_consume(
    real_nsqd: Callable[..., Any], tls_files: dict[str, str], is_tls: bool, compression: str | None
) -> None:
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}")
    options: dict[str, Any] = {
        "tls_v1": is_tls,
        "tls_options": {"cafile": tls_files["ca"]},
        "output_buffer_timeout": 25,
    }
    if compression:
        options[compression] = True
    publish(nsqd.tcp_address, RecordingOwner(), **options)
    owner = Consumer()
    conn = Connection(nsqd.tcp_address, ConnectionConfig(**options), owner)
    conn.connect()
    assert (conn.info.tls_v1, conn.info.snappy, conn.info.deflate) == (
        is_tls, compression == "snappy", compression == "deflate",
    )  # fmt: skip
    conn.subscribe("t", "c")
    conn.set_rdy(100)
    owner.wait(lambda: len(owner.messages) == len(BODIES))
    conn.start_close()
    owner.wait(lambda: owner.close_waits)
    conn.close()
    assert sorted(message.body for message in owner.messages) == sorted(BODIES)
    assert owner.answer_failed == []
    assert conn.in_flight == 0


def test_certificate_of_a_real_nsqd_is_verified(real_nsqd: Callable[..., Any], tls_files: dict[str, str]) -> None:
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}")
    with pytest.raises(ConnectFailed, match="verify failed"):
        Connection(nsqd.tcp_address, ConnectionConfig(tls_v1=True), RecordingOwner()).connect()


def test_real_errors(real_nsqd: Callable[..., Any]) -> None:
    nsqd = real_nsqd("-max-channel-consumers=1", "-msg-timeout=1s")
    owner = RecordingOwner()
    first, second = (Connection(nsqd.tcp_address, ConnectionConfig(), owner) for _ in range(2))
    first.connect()
    first.subscribe("t", "c")
    second.connect()
    with pytest.raises(SubFailed):
        second.subscribe("t", "c")
    first.request(_codec.pub("t", b"x"), "PUB", 1)
    first.set_rdy(1)
    owner.wait(lambda: owner.messages)
    message = owner.messages[0]
    first.finish_returned(message)
    first.finish_returned(message)
    owner.wait(lambda: owner.answer_failed)
    assert isinstance(owner.answer_failed[0][0], FinFailed)
    assert owner.answer_failed[0][1] == message.id
    first.write(b"PUB bad!topic\n\0\0\0\1x")
    first.session.expect("PUB", "bad")
    owner.wait(lambda: len(owner.ends) == 2)
    assert isinstance(owner.ends[1], BadTopic)


def test_killed_server_is_noticed(real_nsqd: Callable[..., Any]) -> None:
    nsqd = real_nsqd()
    owner = RecordingOwner()
    conn = Connection(nsqd.tcp_address, ConnectionConfig(), owner)
    conn.connect()
    nsqd.kill()
    owner.wait_end()
    assert not conn.is_open


PROGRAM = """
import sys
if sys.argv[1] == "before":
    from gevent import monkey; monkey.patch_all()
from nsq_fast import _codec
from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from support.blocking import Connection
if sys.argv[1] == "after":
    from gevent import monkey; monkey.patch_all()
import socket
assert (socket.socket.__module__ != "socket") == (sys.argv[1] != "never")
from support.peers import RecordingOwner

owner = RecordingOwner()
conn = Connection(
    Address("127.0.0.1", int(sys.argv[2])),
    ConnectionConfig(tls_v1=True, snappy=True, tls_options={"cafile": sys.argv[3]}), owner,
)
conn.connect()
conn.request(_codec.pub("t", b"x"), "PUB", "token")
conn.close()
print(owner.replies)
"""


@pytest.mark.parametrize("patched", ["never", "before", "after"])
def test_patched_or_not(real_nsqd: Callable[..., Any], tls_files: dict[str, str], patched: str) -> None:
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, patched, str(nsqd.tcp_address.port), tls_files["ca"]],
        capture_output=True, text=True, timeout=PROCESS, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert run.stderr == ""
    assert run.stdout.strip() == "[('token', b'OK')]"
