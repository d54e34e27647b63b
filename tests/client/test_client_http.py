"""HTTP on either loop, with servers that work, lie, hang and flood."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from typing import Any

import pytest
import trustme
from support.http_server import Question, reply, scripted_http
from support.ports import free_address
from support.waiting import WAIT, promptly

from nsq_fast.client.http import Endpoint, HttpClient
from nsq_fast.client.loop import Event
from nsq_fast.errors import ConfigError, HttpError

log = logging.getLogger("nsq_fast.test")


def client_of(server: Any, scheme: str = "http", **options: Any) -> HttpClient:
    return HttpClient(Endpoint(scheme, server.address), **options)


async def failure_of(sequence: Any) -> HttpError:
    with pytest.raises(HttpError) as raised:
        await sequence
    return raised.value


def test_a_request_and_its_reply(on_loop: Any) -> None:
    def script(question: Question) -> None:
        asked.append(question)
        question.send(reply(b"stored", "201 Created", "X-Name: value\r\n"))

    asked: list[Question] = []
    with scripted_http(script) as [server]:

        async def test(loop: Any) -> None:
            client = client_of(server, headers={"Accept": "text/plain"})
            found = await client.ask(loop, "POST", "/p", {"a": "b c", "no": None}, b"body", headers={"X-One": "1"})
            assert (found.status, found.body, found.headers["x-name"]) == (201, b"stored", "value")
            client.close()

        on_loop(test)
    [question] = asked
    assert (question.method, question.target, question.body) == ("POST", "/p?a=b+c", b"body")
    for line in (f"Host: {server.address}", "Accept: text/plain", "X-One: 1", "Content-Length: 4"):
        assert f"\r\n{line}\r\n" in question.head


def test_a_refusal_says_why_and_redirects_are_not_followed(on_loop: Any) -> None:
    def script(question: Question) -> None:
        if question.target == "/moved":
            question.send(reply(b"", "302 Found", "Location: /other\r\n"))
        else:
            question.answer({"message": "TOPIC_NOT_FOUND"}, "404 Not Found")

    with scripted_http(script) as [server]:

        async def test(loop: Any) -> None:
            client = client_of(server)
            error = await failure_of(client.ask(loop, "GET", "/lookup"))
            assert (error.status, error.text) == (404, "TOPIC_NOT_FOUND")
            assert (await failure_of(client.ask(loop, "GET", "/moved"))).status == 302
            client.close()

        on_loop(test)
        assert server.targets == ["/lookup", "/moved"]


def test_connections_are_kept_until_the_server_or_close_ends_them(on_loop: Any) -> None:
    def script(question: Question) -> None:
        question.answer()
        if question.target == "/last":
            question.end()

    with scripted_http(script) as [server]:

        async def test(loop: Any) -> None:
            client = client_of(server)
            for path in ("/", "/", "/last"):
                await client.ask(loop, "GET", path)
            assert server.connections == 1
            with server.changed:
                assert server.changed.wait_for(lambda: not server.open, WAIT)
            await client.ask(loop, "GET", "/")
            assert server.connections == 2
            client.close()
            await client.ask(loop, "GET", "/")
            assert server.connections == 3
            client.close()

        on_loop(test)


BROKEN = {
    "nothing": b"",
    "no HTTP": b"E_INVALID\r\n\r\n",
    "zeros": b"\x00" * 100,
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOK",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nOK",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nOK",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nOK",
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "version": b"HTTP/9.9 999 \xff\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_reply_is_an_error_without_a_status(on_loop: Any, data: bytes) -> None:
    def script(question: Question) -> bool:
        question.send(data)
        return False

    with scripted_http(script) as [server]:

        async def test(loop: Any) -> None:
            with promptly():
                assert (await failure_of(client_of(server).ask(loop, "GET", "/"))).status is None

        on_loop(test)


FLOODS = {
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"x" * 4096, "a reply of more than"),
    "body without end": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 4096, "a reply of more than"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 700, "a reply of more than"),
    "header": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 4096, "headers of more than"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: yyyyyyyyyyy\r\n" * 256, "headers of more than"),
    "interim replies": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 160, "headers of more than"),
    "trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"name: " + b"x" * 4096 + b"\r\n",
        "of trailers or of chunk sizes",
    ),
    "chunk extension": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"x" * 4096,
        "of trailers or of chunk sizes",
    ),
}


@pytest.mark.parametrize(("begin", "then", "problem"), FLOODS.values(), ids=FLOODS)
def test_a_flood_is_given_up_and_others_have_their_turns(on_loop: Any, begin: bytes, then: bytes, problem: str) -> None:
    def script(question: Question) -> None:
        question.send(begin)
        while True:
            question.send(then)

    least = 100 if then.startswith(b"1\r\n") else 1  # a chunk costs as much as a read

    with scripted_http(script) as [server]:

        async def test(loop: Any) -> None:
            turns = 0
            asked = Event(loop)

            async def take_turns() -> None:
                nonlocal turns
                while not asked.is_set:
                    turns += 1
                    await loop.sleep(0)

            other = loop.supervisor(log).job("turns", take_turns)
            error = await failure_of(client_of(server, max_reply_size=20_000).ask(loop, "GET", "/"))
            asked.set()
            assert problem in str(error)
            assert turns >= least
            assert await other.join(WAIT)

        on_loop(test)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_body_in_small_chunks_is_taken(on_loop: Any, size: int) -> None:
    body = b"x" * 30_000
    chunks = b"".join(b"%x\r\n%b\r\n" % (size, body[:size]) for _ in range(len(body) // size))
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with scripted_http(lambda question: question.send(data)) as [server]:

        async def test(loop: Any) -> None:
            assert (await client_of(server).ask(loop, "GET", "/")).body == body

        on_loop(test)


def test_the_time_limit_is_for_the_whole_request(on_loop: Any) -> None:
    def drip(question: Question) -> None:
        question.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            question.send(b"x")
            time.sleep(0.01)  # sleep: each byte in time, the reply never

    with scripted_http(drip, Question.hang) as servers:

        async def test(loop: Any) -> None:
            for server in servers:
                with promptly():
                    error = await failure_of(client_of(server, timeout=0.2).ask(loop, "GET", "/"))
                assert error.status is None
                assert error.text == "no reply within 0.2 s"

        on_loop(test)


def test_a_request_that_is_given_up_closes_its_connection(on_loop: Any) -> None:
    with scripted_http(Question.hang) as [server]:

        async def test(loop: Any) -> None:
            client = client_of(server, timeout=10 * WAIT)
            task = loop.supervisor(log).job("ask", client.ask, loop, "GET", "/")
            while not server.open:
                await loop.sleep(0.001)  # sleep: looks again and again
            task.cancel()
            assert await task.join(WAIT)
            with server.changed:
                assert server.changed.wait_for(lambda: not server.open, WAIT)

        on_loop(test)


def test_nobody_there_and_no_such_host(on_loop: Any) -> None:
    async def test(loop: Any) -> None:
        error = await failure_of(HttpClient(Endpoint("http", free_address())).ask(loop, "GET", "/"))
        assert "refused" in error.text
        nowhere = Endpoint("http", free_address()._replace(host="host.invalid"))
        assert (await failure_of(HttpClient(nowhere, timeout=5).ask(loop, "GET", "/"))).status is None

    on_loop(test)


def test_what_http_cannot_carry_is_refused(on_loop: Any) -> None:
    client = HttpClient(Endpoint("http", free_address()))

    async def test(loop: Any) -> None:
        for method, path, headers in (
            ("GET", "/a b", {}),
            ("GET", "/a\r\nX: y", {}),
            ("G T", "/", {}),
            ("GET", "/é", {}),
            ("GET", "/", {"X": "a\r\nY: b"}),
            ("GET", "/", {"X Y": "a"}),
        ):
            with pytest.raises(ConfigError):
                await client.ask(loop, method, path, headers=headers)

    on_loop(test)


def test_https(on_loop: Any, authority: trustme.CA, tmp_path: Any) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    big = b"y" * 1_000_000

    def script(question: Question) -> None:
        question.answer(question.body)

    with scripted_http(script, ssl_context=context) as [server]:

        async def test(loop: Any) -> None:
            trusted = {"cafile": str(tmp_path / "ca.pem"), "server_hostname": "localhost"}
            client = client_of(server, "https", tls_options=trusted)
            for body in (b"x", big, b"z"):
                assert (await client.ask(loop, "POST", "/", body=body)).body == body
            assert server.connections == 1
            client.close()
            for options in ({"cafile": trusted["cafile"]}, None):
                stranger = client_of(server, "https", tls_options=options)
                assert "certificate" in (await failure_of(stranger.ask(loop, "GET", "/"))).text

        on_loop(test)


def test_files_of_tls_that_are_renewed_are_read_by_the_next_connection(
    on_loop: Any, authority: trustme.CA, tmp_path: Any
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    cafile = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(cafile)
    with scripted_http(lambda question: question.answer(), ssl_context=context) as [server]:

        async def test(loop: Any) -> None:
            client = client_of(server, "https", tls_options={"cafile": str(cafile), "server_hostname": "localhost"})
            assert "certificate" in (await failure_of(client.ask(loop, "GET", "/"))).text
            cafile.write_text("half of a certificate")
            assert str(cafile) in (await failure_of(client.ask(loop, "GET", "/"))).text
            authority.cert_pem.write_to_path(cafile)
            assert (await client.ask(loop, "GET", "/")).body == b"OK"
            client.close()

        on_loop(test)


def test_one_client_serves_several_loops(on_loop: Any) -> None:
    """Each with connections of its own; who closes the client closes those of all."""
    with scripted_http(lambda question: question.answer()) as [server]:
        client = client_of(server)
        assert client.request("GET", "/").body == b"OK"

        async def test(loop: Any) -> None:
            await client.ask(loop, "GET", "/")
            await client.ask(loop, "GET", "/")

        on_loop(test)
        assert client.request("GET", "/").body == b"OK"
        assert server.connections <= 2
        thread = threading.Thread(target=client.close)
        thread.start()
        thread.join(WAIT)
