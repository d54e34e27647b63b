"""NsqdTCPClient: one TCP connection to an nsqd, driven by its user, one frame at a time.

For programs that speak the protocol by themselves. Consumer and Producer do
not use it: their connections read and write in batches.
"""

from __future__ import annotations

from collections.abc import Iterable

from nsq_fast._codec import Message as CoreMessage

from . import protocol
from .frameclient import HOSTNAME as HOSTNAME
from .frameclient import SHORTNAME as SHORTNAME
from .message import Unconnected
from .negotiation import NegotiatingClient


class _Responder(Unconnected):
    """Sends the responses to a client's messages."""

    def __init__(self, client: NsqdTCPClient) -> None:
        super().__init__()
        self._client = client

    def finish(self, message: CoreMessage) -> None:
        self._client.handle_finish(message)
        super().finish(message)

    def requeue(self, message: CoreMessage, time_ms: int | None = None, backoff: bool = True) -> None:
        self._client.handle_requeue(message, time_ms or 0, backoff)
        super().requeue(message, time_ms, backoff)

    def touch(self, message: CoreMessage) -> None:
        self._client.handle_touch(message)
        super().touch(message)


class NsqdTCPClient(NegotiatingClient):
    """A connection to nsqd.

    Args:
        address, port: the nsqd.
        timeout: seconds for connecting, and for each read and write.
        client_id, hostname: of this client, in nsqd's stats.
        heartbeat_interval: seconds. (The attribute is in milliseconds.)
        output_buffer_size, output_buffer_timeout: of nsqd, in bytes and milliseconds.
        tls_v1, tls_options: TLS; a dict with ``keyfile``, ``certfile``, ``ca_certs``, ``cert_reqs``.
        snappy, deflate, deflate_level: compression.
        sample_rate: percentage of messages to receive; 0: all.
        auth_secret: secret for AUTH.

    Attributes, besides these:
        state: of ``states``: INIT, CONNECTED, DISCONNECTED.
        last_response, last_message: ``time.time()`` of the last frame and the last message.
        ready_count, in_flight: the RDY last sent; messages received and not responded to.
        max_ready_count: the highest RDY that the server takes.

    Every method may raise NSQSocketError.
    """

    def _make_responder(self) -> Unconnected:
        return _Responder(self)

    def listen(self) -> None:
        """Read frames until the connection closes."""
        while self.is_connected:
            self.read_response()

    def handle_finish(self, message: CoreMessage) -> None:
        """A message asks to be finished."""
        self.finish(message.id)

    def handle_requeue(self, message: CoreMessage, timeout: int, backoff: bool) -> None:
        """A message asks to be requeued."""
        self.requeue(message.id, timeout, backoff)

    def handle_touch(self, message: CoreMessage) -> None:
        """A message asks for more time."""
        self.touch(message.id)

    def finish_inflight(self) -> None:
        """Count one message in flight less."""
        self.in_flight -= 1

    # Commands

    def subscribe(self, topic: str, channel: str) -> None:
        """SUB; the reply is read by the caller, as those of all commands below."""
        self.send(protocol.subscribe(topic, channel))

    def publish(self, topic: str, data: bytes, defer: int | None = None) -> None:
        """PUB, or DPUB with ``defer`` milliseconds."""
        command = protocol.publish(topic, data) if defer is None else protocol.deferpublish(topic, data, defer)
        self.send(command)

    def multipublish(self, topic: str, messages: Iterable[bytes]) -> None:
        """MPUB."""
        self.send(protocol.multipublish(topic, messages))

    def ready(self, count: int) -> None:
        """RDY."""
        self.send(protocol.ready(count))
        self.ready_count = count

    def finish(self, message_id: str | bytes) -> None:
        """FIN."""
        self.send(protocol.finish(message_id))
        self.finish_inflight()
        self.on_finish.send(self, message_id=message_id)

    def requeue(self, message_id: str | bytes, timeout: int = 0, backoff: bool = True) -> None:
        """REQ; timeout in ms."""
        self.send(protocol.requeue(message_id, timeout))
        self.finish_inflight()
        self.on_requeue.send(self, message_id=message_id, timeout=timeout, backoff=backoff)

    def touch(self, message_id: str | bytes) -> None:
        """TOUCH."""
        self.send(protocol.touch(message_id))

    def close(self) -> None:
        """CLS: ask for no more messages."""
        self.send(protocol.close())
