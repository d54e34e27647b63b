"""Messages that are given up, on every face."""

from __future__ import annotations

from typing import Any

import pytest
from support.contract import FACES, Face

from nsq_fast import NsqdHTTPClient
from nsq_fast.client.give_up import PublishTo


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
def test_the_producer_of_what_was_given_up_closes_with_the_consumer(face: Face, nsqd_process: Any) -> None:
    async def fail(_consumer: Any, _message: Any) -> None:
        raise ValueError("a handler's own")

    def stats() -> dict[str, Any]:
        with NsqdHTTPClient(*nsqd_process.http) as client:
            return client.stats()

    def is_published() -> bool:
        return any(topic["topic_name"] == "dead" and topic["message_count"] for topic in stats()["topics"])

    async def main() -> None:
        async with face.client("Producer", nsqd_process.address) as producer:
            await face(producer.publish("t", b"x"))
        options = {"max_tries": 1, "requeue_delay": 0, "max_backoff_duration": 0, "give_up": PublishTo("dead")}
        async with face.client("Consumer", "t", "c", nsqd_process.address, message_handler=fail, **options):
            await face.until(is_published)
            await face.until(lambda: len(stats()["producers"] or ()) == 1)  # that of the first publish has gone
        await face.until(lambda: not stats()["producers"])

    face.run(main())
