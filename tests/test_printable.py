"""Text of a peer is shown on one line, without control characters, and never at full length."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.errors import HttpError, ServerError, publish_failed_class, server_error
from nsq_fast.printable import MAX_LENGTH, printable

FORGED = "E_INVALID bad\n2026-01-01 INFO all is well\x1b[2J\u202e\u2028"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain text, ünïcode", "plain text, ünïcode"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\u202etfel", r"\u202etfel"),
        (b"bytes \xff\x00", r"bytes \xff\x00"),
        ("x" * 600, "x" * 500 + "... (100 more)"),
        (b"x" * 8_000_000, "x" * 500 + "... (7999500 more)"),
        ("", ""),
    ],
)
def test_examples(said: str | bytes, shown: str) -> None:
    assert printable(said) == shown


@given(st.one_of(st.text(), st.binary(), st.text(min_size=490, max_size=520)))
def test_whatever_is_said_is_shown_on_one_line_of_bounded_length(said: str | bytes) -> None:
    shown = printable(said)
    assert shown.isprintable()
    assert len(shown) <= 10 * MAX_LENGTH + 30


def test_errors_show_what_a_server_said_safely_and_keep_it_as_it_came() -> None:
    error = server_error(FORGED.encode())
    assert str(error).isprintable()
    assert repr(error).isprintable()
    assert error.detail == FORGED.partition(" ")[2]
    refused = publish_failed_class(error)(f"publish failed: {error}")
    assert str(refused).isprintable()
    assert repr(refused).isprintable()
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.detail, str(copy)) == (error.detail, str(error))


def test_an_unknown_code_of_any_length_is_cut() -> None:
    error = server_error(b"\x1b" * 8_000_000)
    assert type(error) is ServerError
    assert len(str(error)) < 4 * MAX_LENGTH + 30
    assert len(repr(error)) < 8 * MAX_LENGTH + 60


def test_http_errors_too() -> None:
    error = HttpError("http://h:1/", 500, FORGED)
    assert str(error).isprintable()
    assert repr(error).isprintable()
    assert error.text == FORGED
