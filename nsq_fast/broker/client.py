"""All that the broker takes from the client: nothing else in it imports the runtime, the protocol or the core.

The broker checks the client, so it has a wire format of its own: frames, commands and compression are written
and read here by other code than the client's.
"""

from __future__ import annotations

from nsq_fast.client.http import Endpoint, HttpClient
from nsq_fast.protocol.dialect import TAG_KEY, TRACE_ID_KEY

__all__ = ["TAG_KEY", "TRACE_ID_KEY", "Endpoint", "HttpClient"]
