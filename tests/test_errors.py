"""Error frames become exceptions whose policy is data."""

import pytest

from nsq_fast import errors
from nsq_fast.errors import ERROR_CODES, ServerError, server_error


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (b"E_BAD_TOPIC PUB topic", errors.BadTopic, "PUB topic"),
        (b"E_FAILED_ON_NOT_LEADER ", errors.NotLeader, ""),
        (b"E_TOPIC_NOT_EXIST", errors.TopicNotExist, ""),
        (b"INVALID_TRACE_ID ", errors.TraceIdInvalid, ""),
        (b"E_BAD_PROTOCOL", errors.BadProtocol, ""),
    ],
)
def test_the_first_token_decides(data, kind, detail):
    error = server_error(data)
    assert type(error) is kind
    assert error.detail == detail
    assert str(error) == data.decode().rstrip()


@pytest.mark.parametrize("data", [b"too much client connections", b"E_NEW thing", b"", b"\xff\xfe", b" "])
def test_unknown_codes_are_plain_and_fatal(data):
    error = server_error(data)
    assert type(error) is ServerError
    assert error.fatal
    assert not error.retriable
    assert str(error) == data.decode("utf-8", "replace").rstrip()


def test_only_the_answer_errors_and_headers_are_not_fatal():
    not_fatal = {code for code, cls in ERROR_CODES.items() if not cls.fatal}
    assert not_fatal == {
        "E_FIN_FAILED",
        "E_REQ_FAILED",
        "E_TOUCH_FAILED",
        "E_EXT_NOT_SUPPORT",
        "E_INVALID_JSON_HEADER",
        "INVALID_TRACE_ID",
        "E_CREATE_TOPIC_FAILED",
    }


def test_what_makes_the_topology_stale_may_be_retried():
    stale = [cls for cls in ERROR_CODES.values() if cls.stale_topology]
    assert {cls.code for cls in stale} == {"E_TOPIC_NOT_EXIST", "E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE"}
    assert all(cls.retriable for cls in stale)


def test_timeouts_are_timeouts_and_losses_are_os_errors():
    assert issubclass(errors.PublishTimeout, TimeoutError)
    assert issubclass(errors.ConnectionLost, OSError)
    assert errors.PublishFailed("x", possibly_stored=True).possibly_stored
