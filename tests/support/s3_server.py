"""An object store for tests: moto's S3 in a thread of this process, on a port of its own, with faults to be set."""

from __future__ import annotations

import io
import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from .s3 import BUCKET, CREDENTIALS, REGION, UNAVAILABLE, Fault, loses_its_answer


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


class S3Server:
    """Carries out one request after another, so that a conditional put is atomic.

    Attributes:
        requests: how many of each kind it has had: ``PUT``, ``GET``, ``LIST``...
        faults: of requests to come, by method: the first one takes the first.
        ignores_conditions: whether it puts an object in place of another whatever it is asked.
        page: most objects in one answer to a listing; None: as many as S3.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.faults: dict[str, deque[Fault]] = {}
        self.ignores_conditions = False
        self.page: int | None = None
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: Any = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def client(self) -> Any:
        """Of the test's own."""
        keys = {name.lower(): value for name, value in CREDENTIALS.items()}
        return boto3.session.Session().client("s3", endpoint_url=self.url, region_name=REGION, **keys)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def find(self, prefix: str = "") -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]

    def remove(self, key: str) -> None:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].delete_object(BUCKET, key)

    def lose_answers_after(self, count: int) -> None:
        """So many PUTs and what belongs to them are carried out as they should be; answers to later ones are lost."""

        def good(carry_out: Any, _: Any) -> Iterable[bytes]:
            found: Iterable[bytes] = carry_out()
            return found

        self.fail("PUT", *[good] * (count - 1), *[loses_its_answer] * 100)
        self.fail("HEAD", *[good] * (count - 1), *[UNAVAILABLE] * 100)

    def fail(self, method: str, *faults: Fault) -> None:
        """The next requests of this method fail."""
        self.faults[method] = deque(faults)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ["wsgi.input"] = _read_first(environ)
        method = environ["REQUEST_METHOD"]
        with self._lock:
            self.requests[_kind(method, environ.get("QUERY_STRING", ""))] += 1
            if self.ignores_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)

            if self.page is not None and environ["QUERY_STRING"]:
                environ["QUERY_STRING"] += f"&max-keys={self.page}"

            def carry_out(start: Any = start_response) -> list[bytes]:
                return list(self._app(environ, start))

            if waiting := self.faults.get(method):
                return waiting.popleft()(carry_out, start_response)
            return carry_out()


def _read_first(environ: dict[str, Any]) -> Any:
    """The body, read before the lock is taken: who sends it may be stopped."""
    body = environ["wsgi.input"]
    if environ.get("HTTP_TRANSFER_ENCODING", "").lower() == "chunked":
        return body
    return io.BytesIO(body.read(int(environ.get("CONTENT_LENGTH") or 0)))


def _kind(method: str, query: str) -> str:
    return "LIST" if method == "GET" and "list-type" in parse_qs(query) else method
