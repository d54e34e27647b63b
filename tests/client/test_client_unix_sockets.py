"""An nsqd that listens on Unix sockets: every face reaches it, by TCP's commands and by HTTP."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.contract import FACES, Face
from support.servers import EMBEDDED_NSQD, Daemon, find_server
from support.waiting import WAIT, until

import nsq_fast
from nsq_fast import NsqdHTTPClient, errors
from nsq_fast.broker import options
from nsq_fast.columns import ColumnSubscription
from nsq_fast.config import ConnectionConfig
from nsq_fast.names import parse_address


@pytest.fixture(params=["embedded", "original"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where nsqd.sock and http.sock of an nsqd are. The name of a Unix socket must be short."""
    if request.param == "original":
        found = find_server("nsqd")
        if found is None:
            pytest.skip("no real nsqd")
        command = [str(found), "-https-address=127.0.0.1:0"]
    elif not hasattr(options, "is_path"):
        pytest.skip("the embedded nsqd listens on TCP alone")
    else:
        command = [*EMBEDDED_NSQD]
    with tempfile.TemporaryDirectory(prefix="nsq") as name:
        path = Path(name)
        flags = [f"-tcp-address={path}/nsqd.sock", f"-http-address={path}/http.sock", f"-data-path={path}"]
        server = Daemon([*command, *flags], path / "log")
        server.start()
        try:
            until(lambda: server.check() or (path / "http.sock").exists(), WAIT)
            yield path
        finally:
            server.kill()


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
def test_what_is_published_over_a_unix_socket_is_consumed_over_it(face: Face, folder: Path) -> None:
    address = f"{folder}/nsqd.sock"
    wanted = {b"%d" % number for number in range(20)}
    seen = set()

    async def handle(consumer: Any, message: Any) -> None:
        seen.add(message.body)

    async def main() -> None:
        async with face.client("Producer", nsqd_tcp_addresses=address) as producer:
            for body in wanted:
                assert await face(producer.publish("t", body)) == b"OK"
            assert producer.nsqd_tcp_addresses == {f"unix:{folder}/nsqd.sock"}
        async with face.client("Consumer", "t", "c", nsqd_tcp_addresses=address, message_handler=handle) as consumer:
            await face.until(lambda: consumer.stats().totals.finished >= len(wanted))

    face.run(main())
    assert seen == wanted


def test_columns_come_over_a_unix_socket(folder: Path) -> None:
    with nsq_fast.Producer(f"{folder}/nsqd.sock") as producer:
        producer.publish("t", b"one")
    with ColumnSubscription(parse_address(f"{folder}/nsqd.sock", 1), "t", "c", ConnectionConfig()) as subscription:
        assert str(subscription.local_address) == f"unix:{folder}/nsqd.sock"
        with pytest.raises(errors.LocalProtocolError, match="called already"):
            subscription.open()


def test_its_http_answers_on_a_unix_socket(folder: Path) -> None:
    with NsqdHTTPClient.from_url(f"unix:{folder}/http.sock") as client:
        client.create_topic("made")
        assert [topic["topic_name"] for topic in client.stats()["topics"]] == ["made"]


def test_nobody_listens_and_the_error_names_the_path(tmp_path: Path) -> None:
    with (
        nsq_fast.Producer(nsqd_tcp_addresses=f"{tmp_path}/none") as producer,
        pytest.raises(errors.NoNsqd, match=rf"{tmp_path}/none: No such file"),
    ):
        producer.publish("t", b"x", timeout=0.2)
