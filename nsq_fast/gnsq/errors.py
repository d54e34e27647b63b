"""gnsq's names of our exceptions. They are the same classes, so either name catches what either library raises."""

from __future__ import annotations

from nsq_fast.errors import ERROR_CODES as _BY_CODE
from nsq_fast.errors import NSQAuthDisabled as NSQAuthDisabled
from nsq_fast.errors import NSQAuthFailed as NSQAuthFailed
from nsq_fast.errors import NSQBadBody as NSQBadBody
from nsq_fast.errors import NSQBadChannel as NSQBadChannel
from nsq_fast.errors import NSQBadMessage as NSQBadMessage
from nsq_fast.errors import NSQBadTopic as NSQBadTopic
from nsq_fast.errors import NSQErrorCode as NSQErrorCode
from nsq_fast.errors import NSQException as NSQException
from nsq_fast.errors import NSQFinishFailed as NSQFinishFailed
from nsq_fast.errors import NSQFrameError as NSQFrameError
from nsq_fast.errors import NSQHttpError as NSQHttpError
from nsq_fast.errors import NSQInvalid as NSQInvalid
from nsq_fast.errors import NSQMPubFailed as NSQMPubFailed
from nsq_fast.errors import NSQNoConnections as NSQNoConnections
from nsq_fast.errors import NSQPubFailed as NSQPubFailed
from nsq_fast.errors import NSQPutFailed as NSQPutFailed
from nsq_fast.errors import NSQRequeueFailed as NSQRequeueFailed
from nsq_fast.errors import NSQRequeueMessage as NSQRequeueMessage
from nsq_fast.errors import NSQSocketError as NSQSocketError
from nsq_fast.errors import NSQTouchFailed as NSQTouchFailed
from nsq_fast.errors import NSQUnauthorized as NSQUnauthorized
from nsq_fast.errors import ServerError, server_error

# Codes that servers before 0.2.20 sent.
_OLD_CODES = {b"E_FINISH_FAILED": b"E_FIN_FAILED", b"E_REQUEUE_FAILED": b"E_REQ_FAILED"}

ERROR_CODES: dict[bytes, type[ServerError]] = {code.encode(): cls for code, cls in _BY_CODE.items()}
ERROR_CODES |= {old: ERROR_CODES[new] for old, new in _OLD_CODES.items()}


def make_error(error_code: bytes) -> ServerError:
    """The exception for the data of an error frame, ``CODE text``."""
    code, _, text = error_code.partition(b" ")
    return server_error(_OLD_CODES.get(code, code) + b" " + text)
