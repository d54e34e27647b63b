"""The object store of tests, see ``s3_server``: its bucket, its credentials, and what may go wrong with a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

BUCKET = "journals"
REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "access-key-of-the-test", "AWS_SECRET_ACCESS_KEY": "secret-key-of-the-test"}

Fault = Callable[[Callable[[], Iterable[bytes]], Any], Iterable[bytes]]
"""Gets what would carry the request out, and WSGI's ``start_response``."""


def answers(status: str, code: str) -> Fault:
    """The request is not carried out, and answered with an error."""

    def fault(_: Any, start_response: Any) -> list[bytes]:
        body = f"<Error><Code>{code}</Code><Message>said the test</Message></Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    return fault


UNAVAILABLE = answers("503 Service Unavailable", "ServiceUnavailable")


def loses_its_answer(carry_out: Any, start_response: Any) -> list[bytes]:
    """The request is carried out, and its answer is an error as of a gateway."""
    carry_out(lambda *_: lambda _: None)
    return UNAVAILABLE(carry_out, start_response)


def cuts_its_answer(_: Any, start_response: Any) -> list[bytes]:
    """Less comes than was announced."""
    start_response("200 OK", [("Content-Length", "100")])
    return [b"part"]
