"""The commands of a producer, for a server that is known.

nsqio/nsq: nsqd/protocol_v2.go, PUB, MPUB, DPUB; youzan/nsq: nsqdserver/protocol_v2.go, Exec has those with a trace id
or a header, and the partition behind the topic. Each has one reply. A name that is not allowed, or a body that no frame
can hold, is refused here: the server would close the connection, and with it fail what others have published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nsq_fast import _codec
from nsq_fast.names import check_topic

from .conversation import Conversation


class PublishCommands(Conversation):
    """A conversation that publishes. The methods return bytes to write, and the reply comes with ``token``.

    They raise LocalProtocolError for a command that is not allowed now or that the server does not have, NameInvalid,
    TypeError or ValueError for arguments; no reply is due then.
    """

    def pub(self, topic: str, body: bytes, *, partition: int | None = None, token: Any = None) -> bytes:
        """Publish one message."""
        return self._publish("PUB", partition, token, _codec.pub, topic, body)

    def mpub(self, topic: str, bodies: Iterable[bytes], *, partition: int | None = None, token: Any = None) -> bytes:
        """Publish several messages at once: all of them or none."""
        return self._publish("MPUB", partition, token, _codec.mpub, topic, bodies)

    def dpub(self, topic: str, delay_ms: int, body: bytes, *, token: Any = None) -> bytes:
        """Publish one message that is delivered after ``delay_ms`` at the earliest. Original servers only."""
        self._check("DPUB", None)
        data = _codec.dpub(check_topic(topic), delay_ms, body)
        self.pending.append(("DPUB", token))
        return data

    def pub_trace(
        self, topic: str, trace_id: int, body: bytes, *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish one message with a trace id; the Reply has a receipt. Redesigned servers only, as all below."""
        return self._publish("PUB_TRACE", partition, token, _codec.pub_trace, topic, trace_id, body)

    def mpub_trace(
        self, topic: str, pairs: Iterable[tuple[int, bytes]], *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish several (trace id, body) at once; the Reply has one receipt for all."""
        return self._publish("MPUB_TRACE", partition, token, _codec.mpub_trace, topic, pairs)

    def pub_ext(
        self, topic: str, header: bytes, body: bytes, *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish one message with a JSON header. The Reply has a receipt if the header holds a ``##trace_id``."""
        return self._publish("PUB_EXT", partition, token, _codec.pub_ext, topic, header, body)

    def mpub_ext(
        self, topic: str, pairs: Iterable[tuple[bytes, bytes]], *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish several (JSON header, body) at once. An error to it is always fatal: close the connection then."""
        return self._publish("MPUB_EXT", partition, token, _codec.mpub_ext, topic, pairs)

    def _publish(
        self, command: str, partition: int | None, token: Any, build: Callable[..., bytes], topic: str, *args: Any
    ) -> bytes:
        self._check(command, partition)
        data = build(check_topic(topic), *args, partition)
        # Only now: a command whose bytes could not be built is never sent, so no reply to it may be due.
        self.pending.append((command, token))
        return data
