"""What the client asks of a loop, on each of them."""

from __future__ import annotations

import logging
from typing import Any

import gevent
import pytest
from gevent import get_hub
from support.waiting import WAIT

from nsq_fast.client.greenlets import Waiters
from nsq_fast.client.loop import Event
from nsq_fast.errors import InternalError, NsqError

log = logging.getLogger("nsq_fast.test")


def test_jobs_run_beside_each_other_and_are_joined(on_loop: Any) -> None:
    async def test(loop: Any) -> None:
        said: list[str] = []
        supervisor = loop.supervisor(log)

        async def say(*words: str) -> None:
            for word in words:
                said.append(word)
                await loop.sleep(0)

        tasks = [supervisor.job("say", say, *words) for words in ("ab", "cd")]
        assert said == []
        for task in tasks:
            assert await task.join(WAIT)
            assert task.ready()
        assert said == ["a", "c", "b", "d"]

    on_loop(test)


def test_a_job_is_cancelled_where_it_waits_but_not_by_itself(on_loop: Any) -> None:
    async def test(loop: Any) -> None:
        ended: list[object] = []
        waits = Event(loop)

        async def wait() -> None:
            assert task.is_current()
            task.cancel()
            waits.set()
            try:
                await loop.wait(loop.waiter())
            finally:
                ended.append("well")

        supervisor = loop.supervisor(log, ended.append)
        task = supervisor.job("wait", wait)
        assert not task.is_current()
        assert await waits.wait(WAIT)
        assert not await task.join(0.001)
        task.cancel()
        task.cancel()
        assert await task.join(WAIT)
        assert ended == ["well"]

    on_loop(test)


def test_what_is_kept_begins_again_and_its_faults_are_told(
    on_loop: Any, caplog: pytest.LogCaptureFixture, no_unseen_errors: list[Any]
) -> None:
    async def test(loop: Any) -> None:
        faults: list[NsqError] = []
        starts = 0

        async def fail_twice() -> None:
            nonlocal starts
            starts += 1
            await loop.sleep(0)
            if starts < 3:
                raise ValueError(f"fault {starts}")

        task = loop.supervisor(log, faults.append).keep("fail_twice", fail_twice)
        assert await task.join(WAIT)
        assert starts == 3
        assert [type(each) for each in faults] == [InternalError, InternalError]
        assert [str(each.__cause__) for each in faults] == ["fault 1", "fault 2"]
        assert "fail_twice: ValueError('fault 2'); it begins again in 0.2 s" in caplog.text

    on_loop(test)
    assert len(no_unseen_errors) == 2
    no_unseen_errors.clear()


def test_a_job_that_fails_is_told_of_whatever_the_receiver_does(
    on_loop: Any, caplog: pytest.LogCaptureFixture, no_unseen_errors: list[Any]
) -> None:
    async def test(loop: Any) -> None:
        async def fail() -> None:
            raise ValueError("fault")

        def refuse(error: NsqError) -> None:
            raise OSError("of the receiver")

        assert await loop.supervisor(log, refuse).job("fail", fail).join(WAIT)
        assert "ValueError('fault'); it is not tried again" in caplog.text
        assert "OSError: of the receiver" in caplog.text

    on_loop(test)
    no_unseen_errors.clear()


def test_all_who_wait_for_an_event_go_on_when_it_is_set(on_loop: Any) -> None:
    async def test(loop: Any) -> None:
        event = Event(loop)
        assert not await event.wait(0.001)
        results: list[bool] = []

        async def wait() -> None:
            results.append(await event.wait())

        supervisor = loop.supervisor(log)
        tasks = [supervisor.job("wait", wait) for _ in range(3)]
        await loop.sleep(0.001)  # sleep: a turn of the loop, by the timer that is tested
        tasks[0].cancel()
        await tasks[0].join(WAIT)
        event.set()
        for task in tasks[1:]:
            assert await task.join(WAIT)
        assert results == [True, True]
        assert await event.wait(0)
        event.clear()
        assert not await event.wait(0)

    on_loop(test)


def test_a_worker_that_is_killed_as_it_is_woken_leaves_the_message_to_another() -> None:
    waiters = Waiters()
    served: list[str] = []

    def wait(name: str) -> None:
        waiters.wait()
        served.append(name)

    first, second = gevent.spawn(wait, "first"), gevent.spawn(wait, "second")
    gevent.idle()
    get_hub().loop.run_callback(first.throw, gevent.GreenletExit)
    waiters.release()
    second.join(WAIT)
    assert served == ["second"]


def test_who_is_killed_while_nothing_comes_takes_nothing_with_it() -> None:
    waiters = Waiters()
    killed, other = gevent.spawn(waiters.wait), gevent.spawn(waiters.wait)
    gevent.idle()
    killed.kill()
    waiters.release()
    waiters.release()
    other.join(WAIT)
    assert other.successful()
    waiters.wait()  # the second release was for whoever comes next
