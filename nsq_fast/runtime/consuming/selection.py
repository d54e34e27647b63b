"""Which messages a handler gets: those in order, with bodies that can be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import Message
from nsq_fast._dispatch import InboundQueue
from nsq_fast.errors import ConnectionLost, NsqError
from nsq_fast.protocol.idempotence import IDEMPOTENCE_HEADER, SeenKeys

from .bodies import decompressed, is_compressed
from .stats import Counters

if TYPE_CHECKING:
    from .context import Requeuer

_PLAIN = r"[A-Za-z0-9_.:-]+"
_KEY_MARK = IDEMPOTENCE_HEADER.encode()

Check = Callable[[list[Message]], list[Message]]


class Selection:
    """Chooses from what one connection has received.

    Args:
        inbound: the messages of the connection.
        disposition: gets what cannot be read.
        in_order: verifies the order, and returns what shall be handled; None where there is no order.
        size_limit: largest body in bytes after it was decompressed; None: compressed bodies are left as they are.
        skip_header: messages that have this extended header are finished; None: all are handled.
        seen_keys: copies of a message whose key is in there are finished; None: all are handled.
        counters: of the target.
    """

    def __init__(
        self,
        inbound: InboundQueue,
        disposition: Requeuer,
        in_order: Check | None,
        size_limit: int | None,
        skip_header: str | None,
        seen_keys: SeenKeys | None,
        counters: Counters,
    ) -> None:
        self._skip_header = skip_header
        # What a name looks like in JSON is known for plain ones only; with others all headers are read.
        self._skip_mark = skip_header.encode() if skip_header and re.fullmatch(_PLAIN, skip_header) else b""
        self._seen_keys = seen_keys
        self._counters = counters
        self._inbound = inbound
        self._disposition = disposition
        self._in_order = in_order
        self._size_limit = size_limit

    def check(self) -> Check | None:
        """What chooses; None when every message is handled as it came."""
        extended = self._size_limit, self._skip_header, self._seen_keys
        has_extended = any(each is not None for each in extended)
        return self._readable_in_order if has_extended else self._in_order

    def is_in_order(self, message: Message) -> bool:
        """Whether a message may be handled, as to its place in the order."""
        return self._in_order is None or bool(self._in_order([message]))

    def _readable_in_order(self, messages: list[Message]) -> list[Message]:
        if self._in_order is not None:
            messages = self._in_order(messages)
        if self._skip_header is not None:
            messages = [each for each in messages if not self._is_skipped(each, self._skip_header)]
        if self._seen_keys is not None:
            messages = [each for each in messages if not self._is_suppressed(each, self._seen_keys)]
        return [each for each in map(self._readable, messages) if each is not None]

    def _is_skipped(self, message: Message, header: str) -> bool:
        """Finish a message that has the header; say whether it has."""
        # Few have it: the name is looked for before all headers are read.
        if message.ext is None or self._skip_mark not in message.ext or header not in _headers(message):
            return False
        self._counters.skipped += 1
        _finish(message)
        return True

    def _is_suppressed(self, message: Message, seen: SeenKeys) -> bool:
        """Finish a message that is a copy of one that came before; say whether it is one."""
        if message.ext is None or _KEY_MARK not in message.ext:
            return False
        key = _headers(message).get(IDEMPOTENCE_HEADER)
        if not isinstance(key, str) or not seen.is_copy(message.topic or "", key, message.id):
            return False
        self._counters.suppressed += 1
        _finish(message)
        return True

    def _readable(self, message: Message) -> Message | None:
        if self._size_limit is None or not is_compressed(message):
            return message
        try:
            return self._in_place_of(message, decompressed(message, self._size_limit))
        except NsqError as error:
            # Who has chosen no policy has not agreed to lose what another version of this program may read.
            if self._disposition.has_policy and self._disposition.is_beyond(self._inbound, message):
                return message  # for the give-up policy, as it came
            self._disposition.unreadable(message, error)
            return None

    def _in_place_of(self, message: Message, readable: Message) -> Message:
        """The message that a handler gets, which is in flight now instead of the one that came."""
        if readable is not message:
            # Only one of the two may be responded to: both have the id that nsqd knows.
            message.mark_responded()
            self._inbound.ledger.follow(readable)
        return readable


def _finish(message: Message) -> None:
    with suppress(ConnectionLost):  # nsqd delivers it again, and it is finished then
        message.finish()


def _headers(message: Message) -> Mapping[str, Any]:
    try:
        return message.headers
    except NsqError:  # no JSON: the handler sees it, and can tell
        return {}
