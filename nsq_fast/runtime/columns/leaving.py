"""The end of a column subscription: a barrier, behind which the outcome of every FIN is known."""

from __future__ import annotations

import logging

from nsq_fast._codec import req_columns
from nsq_fast.errors import NsqError
from nsq_fast.log_events import CLOSE_FAILED
from nsq_fast.protocol.session import Session

from .intake import ColumnIntake

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0
# Between reading RDY and obeying it nsqd may still push a message, which comes behind CLOSE_WAIT then.
# nsqio/nsq: nsqd/protocol_v2.go, messagePump
STRAGGLER_WAIT = 0.005


def leave(intake: ColumnIntake, session: Session) -> None:
    """End the conversation: what is held is given back, every FIN has been judged. The caller limits the time.

    1. RDY 0 and CLS: no more messages;
    2. read up to CLOSE_WAIT: the server carries commands out in order, so it has judged every FIN before;
    3. read what it had begun to send;
    4. REQ what is held;
    5. end the stream, and read up to the server's end.
    """
    stream = intake.stream
    may_get_more = intake.held.count < session.rdy
    stream.send(session.set_rdy(0) + session.cls())
    while not intake.has_close_wait:
        intake.take(CLOSE_TIMEOUT)
    if may_get_more:
        intake.take(STRAGGLER_WAIT)
    while intake.is_amid_frame:
        intake.take(CLOSE_TIMEOUT)
    held = intake.held.take()
    if held:
        stream.send(req_columns(held, 0))
    try:
        stream.end()
    except (NsqError, OSError) as error:  # OpenSSL at the other end calls this end of a TLS stream an error
        logger.info("%s: while closing: %s", stream.address, error, extra=CLOSE_FAILED)
