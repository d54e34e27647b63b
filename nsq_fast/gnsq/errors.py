"""gnsq's names of our exceptions. They are the same classes, so either name catches what either library raises."""

from __future__ import annotations

from nsq_fast.errors import ERROR_CODES as _BY_CODE
from nsq_fast.errors import (
    NSQAuthDisabled,
    NSQAuthFailed,
    NSQBadBody,
    NSQBadChannel,
    NSQBadMessage,
    NSQBadTopic,
    NSQErrorCode,
    NSQException,
    NSQFinishFailed,
    NSQFrameError,
    NSQHttpError,
    NSQInvalid,
    NSQMPubFailed,
    NSQNoConnections,
    NSQPubFailed,
    NSQPutFailed,
    NSQRequeueFailed,
    NSQRequeueMessage,
    NSQSocketError,
    NSQTouchFailed,
    NSQUnauthorized,
    ServerError,
    server_error,
)

__all__ = [
    "ERROR_CODES",
    "NSQAuthDisabled",
    "NSQAuthFailed",
    "NSQBadBody",
    "NSQBadChannel",
    "NSQBadMessage",
    "NSQBadTopic",
    "NSQErrorCode",
    "NSQException",
    "NSQFinishFailed",
    "NSQFrameError",
    "NSQHttpError",
    "NSQInvalid",
    "NSQMPubFailed",
    "NSQNoConnections",
    "NSQPubFailed",
    "NSQPutFailed",
    "NSQRequeueFailed",
    "NSQRequeueMessage",
    "NSQSocketError",
    "NSQTouchFailed",
    "NSQUnauthorized",
    "make_error",
]

# Codes that servers before 0.2.20 sent.
_OLD_CODES = {b"E_FINISH_FAILED": b"E_FIN_FAILED", b"E_REQUEUE_FAILED": b"E_REQ_FAILED"}

ERROR_CODES: dict[bytes, type[ServerError]] = {code.encode(): cls for code, cls in _BY_CODE.items()}
ERROR_CODES |= {old: ERROR_CODES[new] for old, new in _OLD_CODES.items()}


def make_error(error_code: bytes) -> ServerError:
    """The exception for the data of an error frame, ``CODE text``."""
    code, _, text = error_code.partition(b" ")
    return server_error(_OLD_CODES.get(code, code) + b" " + text)
