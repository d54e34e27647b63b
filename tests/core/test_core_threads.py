"""The compiled core shared by threads that run at the same time: results are whole, whoever comes first.

The same holds with the interpreter's lock and without one (3.14t); there, importing the core must not bring it back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from support.compiled import NAMES
from support.threads import THREADS, in_threads

import nsq_fast
from nsq_fast import errors
from nsq_fast._codec import HeldMessages, Message, Records, encode_message, fin_many, group_rows, mpub_size
from nsq_fast._frame import OK, ColumnReader, FrameReader

ID = b"0123456789abcdef"
ROUNDS = 300


class Counting:
    """A responder that counts."""

    partition = "a partition"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def finish(self, message: Message) -> None:
        self.calls.append(message)


def message(**options: Any) -> Message:
    return Message(1, 1, ID, b"body", **options)


def test_importing_the_core_leaves_the_interpreters_lock_as_it_is() -> None:
    code = (
        "import sys; lock = getattr(sys, '_is_gil_enabled', lambda: True); before = lock()\n"
        f"import {', '.join(f'nsq_fast.{name}' for name in NAMES)}\n"
        "assert lock() == before, 'importing the core has enabled the lock again'"
    )
    path = {**os.environ, "PYTHONPATH": str(Path(nsq_fast.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=path)
    assert done.returncode == 0, done.stderr


def test_of_threads_that_finish_a_message_one_does() -> None:
    responder = Counting()
    messages = [message(responder=responder) for _ in range(ROUNDS)]
    refused: list[int] = []

    def finish(each: Message) -> None:
        try:
            each.finish()
        except errors.AlreadyResponded:
            refused.append(1)

    def work(_: int) -> None:
        for each in messages:
            finish(each)

    assert in_threads(work) == []
    assert len(responder.calls) == ROUNDS
    assert len(refused) == ROUNDS * (THREADS - 1)


def test_of_threads_that_mark_a_message_one_does() -> None:
    """A handler's return and a finish elsewhere; another thread says meanwhile that it has expired."""
    messages = [message() for _ in range(ROUNDS * 10)]
    marked: list[bool] = []

    def work(number: int) -> None:
        mine = []
        for each in messages:
            each.mark_expired()
            mine.append(each.mark_returned() if number % 2 else each.mark_responded())
        marked.extend(mine)

    assert in_threads(work) == []
    assert sum(marked) == len(messages)
    assert all(each.has_expired() and each.has_responded() for each in messages)


def test_threads_see_the_same_headers() -> None:
    for _ in range(ROUNDS // 10):
        one = message(ext=b'{"key": "value"}')
        seen: list[dict[str, Any]] = []
        assert in_threads(lambda _, one=one, seen=seen: seen.append(one.headers)) == []
        assert all(each is seen[0] for each in seen)


def test_a_responder_may_be_replaced_while_others_respond() -> None:
    one = message(responder=Counting())
    partitions: set[object] = set()

    def work(number: int) -> None:
        for _ in range(ROUNDS * 10):
            if number % 2:
                one.responder = Counting()
            else:
                partitions.add(one.partition)

    assert in_threads(work) == []
    assert partitions == {"a partition"}


def test_what_is_made_cannot_be_made_again() -> None:
    """Others may be reading it: __init__ of an object that is shared would take its bytes away."""
    with pytest.raises(TypeError, match="made once"):
        message().__init__(2, 2, ID, b"other")  # type: ignore[misc]
    with pytest.raises(TypeError, match="made once"):
        OK.__init__(b"other")  # type: ignore[misc]
    assert OK.data == b"OK"


def test_a_list_may_change_while_it_is_written() -> None:
    """Commands are built of what the list holds at one time."""
    shared = [message() for _ in range(50)]
    bodies = [b"body"] * 50
    sizes: list[int] = []
    totals: set[int] = set()

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            if number % 2:
                shared.append(shared.pop())
                bodies.append(bodies.pop())
                del shared[40:], bodies[40:]
                shared.extend([message() for _ in range(10)])
                bodies.extend([b"body"] * 10)
            else:
                sizes.append(len(fin_many(shared)))
                totals.add(mpub_size(bodies, 10))

    assert in_threads(work) == []
    assert all(size % len(b"FIN 0123456789abcdef\n") == 0 for size in sizes)
    assert all((total - 4) % 8 == 0 for total in totals)


def test_threads_that_share_the_messages_held_lose_none() -> None:
    held = HeldMessages()
    held.msg_timeout = 60.0

    def work(_: int) -> None:
        for _ in range(ROUNDS):
            batch = [message() for _ in range(10)]
            held.received(batch)
            held.finish(batch)

    assert in_threads(work) == []
    assert held.count == 0
    assert held.unanswered() == []


def test_threads_that_share_a_reader_of_columns_are_told_or_served() -> None:
    """It decodes without the lock: whoever comes meanwhile is refused, and what is served is whole."""
    reader, data = ColumnReader(), encode_message(1, 1, ID, b"x" * 1000) * 500
    served: list[int] = []
    refused: list[str] = []

    def feed() -> None:
        try:
            columns = reader.feed(data)
        except errors.LocalProtocolError as error:
            refused.append(str(error))
        else:
            served.append(columns.count)
            assert columns.body == b"x" * 1000 * 500

    def work(_: int) -> None:
        for _ in range(ROUNDS // 10):
            feed()

    assert in_threads(work) == []
    assert set(served) == {500}
    assert all("another feed" in each for each in refused)
    assert len(served) + len(refused) == THREADS * (ROUNDS // 10)


def test_arrays_of_records_are_copied() -> None:
    """A thread that writes into them must not be able to make a command longer than it was measured."""
    offsets, rows = array("i", [0, 4, 8]), array("i", [0, 1])
    records = Records(offsets, b"onetwo!!")
    expected = records.mpub("topic", rows=rows)
    offsets[1] = 8
    assert records.mpub("topic", rows=rows) == expected


def test_arrays_may_change_while_commands_are_built_of_them() -> None:
    targets = array("i", [0] * 1000)
    rows = array("i", range(1000))
    records = Records(array("i", range(0, 4004, 4)), b"body" * 1000)
    lengths: set[int] = set()
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            while not done.is_set():
                for at in range(0, 1000, 7):
                    targets[at] = 1 - targets[at]
                    rows[at] = 0
                    rows[at] = at
            return
        try:
            for _ in range(ROUNDS):
                lengths.add(sum(map(len, group_rows(targets, 2))))
                lengths.add(len(records.mpub("topic", rows=rows)) - len(b"MPUB topic\n") - 8 - 4000)
        finally:
            done.set()

    assert in_threads(work) == []
    assert lengths == {4000}


@pytest.mark.parametrize("chunk", [bytes, bytearray])
def test_threads_that_share_a_reader_of_pieces_get_each_message_once(chunk: type) -> None:
    """Only whole messages, since nobody could say what pieces of two threads make together."""
    reader = FrameReader()
    seen: list[bytes] = []

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            body = b"%d-%d" % (number, turn)
            seen.extend(each.body for each in reader.feed(chunk(encode_message(1, 1, ID, body))))

    assert in_threads(work) == []
    assert sorted(seen) == sorted(b"%d-%d" % (n, turn) for n in range(THREADS) for turn in range(ROUNDS))
