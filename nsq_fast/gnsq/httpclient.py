"""HTTPClient: what the clients of nsqd and nsqlookupd share. Requests never block other greenlets."""

from __future__ import annotations

from typing import Any

from nsq_fast.runtime import AdminClient

from .options import USERAGENT, http_options

__all__ = ["USERAGENT", "HTTPClient"]


class HTTPClient(AdminClient):
    """An HTTP client of one server.

    Args:
        useragent: value of the User-Agent header.
        connection_class: a pool class of urllib3; only its scheme (http, https) matters.
        options: of such a pool: ``timeout`` (s), ``ca_certs``, ``cert_reqs``, ``cert_file``, ``key_file``. Others
            that urllib3 knows are ignored.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int | None = None,
        useragent: str = USERAGENT,
        connection_class: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(host, port, user_agent=useragent, **http_options(connection_class, options))
        self.useragent = useragent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address!r}>"
