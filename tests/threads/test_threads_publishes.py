"""Publishes of many threads at once: each has one end, and what the server has is what the callers were told."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from support.held_publishes import OK, PublishNsqd
from support.waiting import WAIT, block_until

from nsq_fast.errors import NoNsqd, NotRunning, NsqError, PublishFailed
from nsq_fast.threads import Producer


def stored(nsqd: PublishNsqd) -> Counter[bytes]:
    return Counter(body for bodies in nsqd.bodies for body in bodies)


def start(count: int, function: Callable[[int], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_server_that_does_not_reply_keeps_no_publish_back() -> None:
    replies = threading.Event()

    def hold_back(sock: socket.socket, _: list[bytes]) -> None:
        threading.Thread(target=lambda: (replies.wait(WAIT), sock.sendall(OK)), daemon=True).start()

    with PublishNsqd(hold_back) as nsqd, Producer(nsqd.address) as producer:
        threads: list[threading.Thread] = []
        for number in range(1, 21):  # each when all before it are there
            threads += start(1, lambda _, body=b"%d" % number: producer.publish("t", body))
            block_until(lambda number=number: stored(nsqd).total() == number, f"publish {number}")
        replies.set()
        join(threads)


@pytest.mark.parametrize("seed", range(4))
def test_each_publish_has_one_end_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)

    def misbehave(sock: socket.socket, bodies: list[bytes]) -> None:
        luck = chance.random()
        if luck < 0.02:
            sock.close()  # stored, and nobody is told
            raise OSError
        if luck < 0.04:
            nsqd.commands.remove((sock, bodies))  # it is lost with the connection
            sock.close()
            raise OSError
        if luck < 0.1:
            threading.Event().wait(0.005)  # meanwhile others are handed over
        sock.sendall(OK)

    ends: dict[bytes, list[object]] = {}
    options = {"retry_unknown_outcome": False, "publish_timeout": WAIT, "max_pending": 12}
    with PublishNsqd(misbehave) as nsqd:
        producer = Producer(nsqd.address, **options)
        producer.start()

        def publish(number: int) -> None:
            own = random.Random(seed * 100 + number)
            for each in range(60):
                body = b"%d-%d" % (number, each)
                outcome: object = None
                try:
                    if own.random() < 0.1:
                        producer.publish_nowait("t", body).add_done_callback(
                            lambda future, body=body: ends.setdefault(body, []).append(future.exception())
                        )
                        continue
                    producer.publish("t", body, block=own.random() < 0.9)
                except (NsqError, NoNsqd) as error:
                    outcome = error
                ends.setdefault(body, []).append(outcome)

        threads = start(12, publish)
        block_until(lambda: len(ends) > 500 or not any(thread.is_alive() for thread in threads), "most publishes")
        producer.close()  # while some still publish
        join(threads)
        block_until(lambda: len(ends) == 12 * 60, "every end")
        kept = stored(nsqd)
    assert all(len(outcomes) == 1 for outcomes in ends.values())
    for body, (outcome,) in ends.items():
        if outcome is None:
            assert kept[body] == 1, body
        elif isinstance(outcome, PublishFailed) and outcome.possibly_stored:
            assert kept[body] <= 1, body
        else:
            assert isinstance(outcome, (PublishFailed, NoNsqd, NotRunning)), outcome
            assert kept[body] == 0, (body, outcome)
