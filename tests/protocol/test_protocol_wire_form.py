"""The commands that forms make for the two kinds of servers, and what callers get for them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from nsq_fast import _codec, errors
from nsq_fast._codec import Records
from nsq_fast.config import MAX_PARTITION
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import ORIGINAL, REDESIGNED
from nsq_fast.protocol.publishing import (
    COUNT_BYTES,
    LENGTH_BYTES,
    OK,
    PLAIN,
    PLAIN_BATCH,
    BatchForm,
    Receipt,
    RowsForm,
    StoredRows,
    WireForm,
    batch_command,
)

TRACED = WireForm("PUB_TRACE", 7, is_traced=True)
OPTIONAL = replace(TRACED, is_optional=True)
HEADER = WireForm("PUB_EXT", header=b'{"a":1}')
RECEIPT = Receipt(1, 7, 0, 30, 0, Address("127.0.0.1", 4150))
EMPTY = Receipt(2, 0, 30, 30, 0, Address("127.0.0.1", 4150))


def rows(trace_ids: list[int] | None = None, *, is_optional: bool = False) -> RowsForm:
    ids = None if trace_ids is None else array("Q", trace_ids)
    return RowsForm(Records(array("i", [0, 1, 3]), b"abb", trace_ids=ids), None, 0, 2, is_optional=is_optional)


@pytest.mark.parametrize(
    ("form", "body", "dialect", "name", "data"),
    [
        (PLAIN, b"x", ORIGINAL, "PUB", _codec.pub("t", b"x")),
        (TRACED, b"x", REDESIGNED, "PUB_TRACE", _codec.pub_trace("t", 7, b"x")),
        (OPTIONAL, b"x", REDESIGNED, "PUB_TRACE", _codec.pub_trace("t", 7, b"x")),
        (OPTIONAL, b"x", ORIGINAL, "PUB", _codec.pub("t", b"x")),
        (HEADER, b"x", REDESIGNED, "PUB_EXT", _codec.pub_ext("t", b'{"a":1}', b"x")),
        (WireForm("DPUB", defer=9), b"x", ORIGINAL, "DPUB", _codec.dpub("t", 9, b"x")),
        (PLAIN_BATCH, [b"x", b"y"], ORIGINAL, "MPUB", _codec.mpub("t", [b"x", b"y"])),
        (BatchForm([HEADER]), [b"x"], REDESIGNED, "MPUB_EXT", _codec.mpub_ext("t", [(b'{"a":1}', b"x")])),
        (BatchForm([OPTIONAL]), [b"x"], ORIGINAL, "MPUB", _codec.mpub("t", [b"x"])),
        (rows(), b"", ORIGINAL, "MPUB", _codec.mpub("t", [b"a", b"bb"])),
        (rows([5, 6], is_optional=True), b"", ORIGINAL, "MPUB", _codec.mpub("t", [b"a", b"bb"])),
        (rows([5, 6]), b"", REDESIGNED, "MPUB_TRACE", _codec.mpub_trace("t", [(5, b"a"), (6, b"bb")])),
    ],
)
def test_a_form_makes_its_command(form: Any, body: Any, dialect: Any, name: str, data: bytes) -> None:
    assert form.command("t", body, None, dialect) == (name, data)


def test_the_partition_stands_in_the_command() -> None:
    assert PLAIN.command("t", b"x", 3, REDESIGNED) == ("PUB", _codec.pub("t", b"x", 3))
    assert batch_command("t", [b"x", b"y"], [TRACED, TRACED], TRACED, 3, REDESIGNED) == (
        "MPUB_TRACE",
        _codec.mpub_trace("t", [(7, b"x"), (7, b"y")], 3),
    )


def test_rows_that_the_server_cannot_take_say_what_to_do() -> None:
    with pytest.raises(errors.ConfigError, match=r"original servers: .*leave trace_id out"):
        rows([5, 6]).command("t", b"", None, ORIGINAL)


@pytest.mark.parametrize("form", [PLAIN, TRACED, HEADER])
def test_the_overhead_is_what_a_message_takes_besides_its_body(form: WireForm) -> None:
    _, one = batch_command("t", [b"x"], [form], form, None, REDESIGNED)
    _, two = batch_command("t", [b"x", b"yy"], [form, form], form, None, REDESIGNED)
    assert len(two) - len(one) == LENGTH_BYTES + 2 + form.overhead
    _, body = one.split(b"\n", 1)
    assert COUNT_BYTES + LENGTH_BYTES + 1 + form.overhead == int.from_bytes(body[:4], "big")


@pytest.mark.parametrize(
    ("form", "receipts", "result"),
    [
        (PLAIN, [], OK),
        (TRACED, [RECEIPT], RECEIPT),
        (PLAIN_BATCH, [], OK),
        (BatchForm([TRACED, TRACED]), [RECEIPT, RECEIPT], [RECEIPT, RECEIPT]),
        (rows(), [], StoredRows(2, 4, [])),
        (rows([7, 0]), [RECEIPT, EMPTY], StoredRows(2, 4, [RECEIPT])),
    ],
)
def test_what_a_caller_gets(form: Any, receipts: list[Receipt], result: Any) -> None:
    assert form.result(form.kept(receipts), 4) == result


def test_the_compiled_core_has_the_limit_of_the_options() -> None:
    assert PLAIN.command("t", b"x", MAX_PARTITION, REDESIGNED)[1].startswith(b"PUB t %d\n" % MAX_PARTITION)
    with pytest.raises(ValueError, match="partition"):
        PLAIN.command("t", b"x", MAX_PARTITION + 1, REDESIGNED)
